"""Build the Python environments of built-in tasks into an image: `python build-environments.py TASK...`."""

from __future__ import annotations

import sys

from tasks.environments import DEFAULT_DIRECTORY, build
from tasks.registry import TaskSource

for name in sys.argv[1:]:
    environment = TaskSource(()).load(name).environment
    if environment is not None:
        print(name, build(environment, DEFAULT_DIRECTORY))
