"""Processes: read the settings, build clients, run roles. The only package that reads the environment.

The package names of this distribution are generic, and pip does not warn when another distribution brings the same ones. So the
first import of every entry point checks that they are ours, and stops with a remedy if not.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

_PACKAGES = ("workflows", "activities", "workers", "tasks", "console")


def check_packages() -> None:
    """Stop when a package of ours is shadowed by another distribution's.

    Raises:
        SystemExit: names the package, where the stranger lies, and what to do.
    """
    home = Path(__file__).resolve().parent.parent
    for name in _PACKAGES:
        spec = importlib.util.find_spec(name)
        origin = Path(spec.origin).resolve() if spec is not None and spec.origin else None
        if origin is None or not origin.is_relative_to(home):
            raise SystemExit(
                f"tttd: package {name!r} comes from {origin or 'nowhere'}, not from {home}. Another distribution here "
                f"installs the same top-level name (llama-index-workflows does); install tttd in an environment of its own."
            )


check_packages()
