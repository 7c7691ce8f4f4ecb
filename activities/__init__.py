"""What each step does: one room a step. The rooms share only records, blobs, errors, context and contracts.

Boundary: rooms do not import each other. Inside a room only ``activity.py`` knows Temporal; the rest is plain Python that a test
calls without a server. Clocks, randomness and ids come in as arguments.
"""
