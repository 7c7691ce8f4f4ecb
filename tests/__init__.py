"""Tests. A package, so that `python -m tests.golden` finds the golden replays."""
