"""Judging: runs a program in the sandbox and certifies its answer. Knows sandboxes and task judges; knows no model and no archive.

Boundary: a program can only produce data. Nothing that it writes, prints or exits with is believed; the score is recomputed from
the data by the task's judge.
"""
