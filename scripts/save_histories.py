"""Saves the histories of one run, one of its steps and one of that step's groups for the replay test.

    python -m scripts.save_histories RUN STEP [--out tests/data/histories] [--suffix NAME]

Save new ones when a workflow changes on purpose, and keep the old: a running workflow has them.
"""

from __future__ import annotations

import argparse
import asyncio
import gzip
from pathlib import Path

from workers.connect import connect_temporal, leave
from workers.settings import load_settings
from workflows import names


async def save(run: str, step: int, out: Path, suffix: str) -> None:
    client = await connect_temporal(load_settings())
    out.mkdir(parents=True, exist_ok=True)
    for workflow_id, kind in [
        (names.run_workflow_id(run), names.DISCOVERY_RUN),
        (names.step_workflow_id(run, step), names.DISCOVERY_STEP),
        (names.group_workflow_id(run, step, 0), names.ROLLOUT_GROUP),
    ]:
        history = await client.get_workflow_handle(workflow_id).fetch_history()
        file = out / f"{kind}-{suffix}.json.gz"
        file.write_bytes(gzip.compress(history.to_json().encode(), mtime=0))
        print(f"{file}: {len(history.events)} events")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("step", type=int)
    parser.add_argument("--out", type=Path, default=Path("tests/data/histories"))
    parser.add_argument("--suffix", default="0.1")
    arguments = parser.parse_args()
    asyncio.run(save(arguments.run, arguments.step, arguments.out, arguments.suffix))
    leave(0)


if __name__ == "__main__":
    main()
