"""Replays of golden files: inputs and outputs of the reference implementations, against this project's own functions.

    python -m tests.golden FILE...

prints pass or fail for every case with the reason. Where we differ from a reference on purpose, the difference is computed and
checked too, and its reason stands in ``documented.py``, the one table of such places.
"""
