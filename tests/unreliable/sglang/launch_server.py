"""`python -m sglang.launch_server` with the embedded engine behind it, and with trouble on order.

Takes SGLang's flags as far as our supervisor uses them, refuses others as SGLang does, and says in the directory UNRELIABLE_DIR
what it was started with (`started`, one JSON line a start). From there it takes its orders:

    slow        a number of seconds to sleep before it answers
    fail        how many starts are to end with an error
    child       start a process beside itself, as SGLang does with its scheduler; its id goes to `children`
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

ORDERS = Path(os.environ["UNRELIABLE_DIR"])


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="sglang.launch_server")
    for flag in ("--model-path", "--host", "--attention-backend", "--sampling-backend", "--context-length"):
        parser.add_argument(flag)
    for flag in ("--port", "--tp-size", "--max-running-requests", "--max-lora-rank", "--max-loras-per-batch", "--max-loaded-loras"):
        parser.add_argument(flag, type=int)
    parser.add_argument("--mem-fraction-static", type=float)
    for switch in ("--enable-lora", "--enable-metrics"):
        parser.add_argument(switch, action="store_true")
    parser.add_argument("--lora-target-modules", nargs="*")
    return parser.parse_args()


def order(name: str) -> float:
    try:
        return float((ORDERS / name).read_text())
    except OSError:
        return 0.0


def main() -> int:
    options = parse()
    with (ORDERS / "started").open("a") as file:
        file.write(json.dumps({"argv": sys.argv[1:], "pid": os.getpid(), "gpus": os.environ.get("CUDA_VISIBLE_DEVICES")}) + "\n")
    if order("child"):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
        with (ORDERS / "children").open("a") as file:
            file.write(f"{child.pid}\n")
    if (fails := order("fail")) > 0:
        (ORDERS / "fail").write_text(str(fails - 1))
        print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB", file=sys.stderr)
        return 1
    time.sleep(order("slow"))
    from workers.engine.embedded.__main__ import main as embedded

    return embedded(["--model-path", options.model_path, "--host", options.host, "--port", str(options.port)])


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
