"""Sampling: prompt, engine request, extraction of the program. Knows tokens and HTTP; knows no sandbox and no archive."""
