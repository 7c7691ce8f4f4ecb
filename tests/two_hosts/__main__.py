"""``python -m tests.two_hosts --cut-seconds 60``: the experiment for people. Needs root, `ip` and `weed`; leaves nothing behind.

Exit codes: 0 passed, 1 failed, 2 this machine cannot do it (and why).
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from pathlib import Path

from tests.seaweed import find_weed
from tests.two_hosts.network import Unavailable, try_link, two_hosts
from tests.two_hosts.trial import Trial, forget_surroundings


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.two_hosts", description=__doc__)
    parser.add_argument("--cut-seconds", type=float, default=60.0, help="how long the link is cut")
    parser.add_argument("--folder", type=Path, help="where the hosts' folders are made; by default a temporary one")
    parser.add_argument("--report", type=Path, help="write what was found as JSON")
    parser.add_argument("--link-only", action="store_true", help="only make the network, cut it, mend it")
    asked = parser.parse_args()
    forget_surroundings()
    try:
        find_weed()
    except RuntimeError as error:
        print(f"two hosts cannot be had here: {error}", file=sys.stderr)
        return 2
    try:
        with two_hosts() as network:
            if asked.link_only:
                print(link := try_link(network))
                return 0 if link.before and link.silent and link.after else 1
            with tempfile.TemporaryDirectory(prefix="two-hosts-") as temporary:
                trial = Trial(network, asked.folder or Path(temporary), asked.cut_seconds, tell)
                report = asyncio.run(trial.carry_out())
    except Unavailable as error:
        print(f"two hosts cannot be had here: {error}", file=sys.stderr)
        return 2
    if asked.report is not None:
        asked.report.write_text(report.as_json(), encoding="utf-8")
    print(f"\n`tttd status cut` on host A before the link came back:\n{report.text}")
    for problem in report.problems():
        print(f"problem: {problem}")
    print(f"{'FAILED' if report.problems() else 'PASSED'} after {report.seconds:.0f} s")
    return 1 if report.problems() else 0


def tell(seconds: float, text: str) -> None:
    print(f"{seconds:6.1f} s  {text}", flush=True)


if __name__ == "__main__":
    code = main()
    if "temporalio" in sys.modules:
        from workers.connect import leave

        leave(code)
    raise SystemExit(code)
