"""`python -m sglang.launch_server`, with the engine that does nothing behind it."""

from __future__ import annotations

import sys

from scripts.scale.engine import main

if __name__ == "__main__":
    sys.exit(main())
