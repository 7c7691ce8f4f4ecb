"""What people use: the `tttd` command, the status report, and what they print.

Boundary: starts and watches runs, reads the store, and asks workflows; it changes a run only through updates, and stores nothing of
a run itself. No module here reads the environment.
"""
