"""Measure a run whose engine, judge and trainer do nothing; what is measured stands in the package's docstring.

    python -m scripts.scale --groups 8 --rollouts 64 --steps 50

Writes OUT/<groups>x<rollouts>x<steps>.json after every step; `python -m scripts.scale.tables OUT/*.json` makes tables of them.
The home folder must not be there yet and is removed when all went well (`--keep` leaves it); an interrupted measurement cannot be
resumed, but what it had measured stays.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
import time
from pathlib import Path
from typing import Any

from temporalio.client import WorkflowHandle

from scripts.scale.fleet import MODEL, Fleet
from scripts.scale.measuring import Follower, judge_microseconds
from scripts.scale.processes import hardware
from scripts.scale.records import Measurement, orchestration_ms, read
from scripts.scale.tables import tables
from workers.connect import connect_temporal, leave
from workflows import names

_PROMPT_TOKENS = 4096
"""Room for the prompt, above what it has here."""
_RESPONSE_TOKENS = 64
_JUDGE_SLOTS = 16
_READ = (1, 2, 10, 25, 50)
"""Steps whose histories are read in full."""
_POLL_SECONDS = 0.2
_STALLED_SECONDS = 600.0


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.scale", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--groups", type=int, default=8)
    parser.add_argument("--rollouts", type=int, default=64, help="of each group")
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--train", choices=("on", "off"), default="on")
    parser.add_argument("--response-tokens", type=int, default=_RESPONSE_TOKENS, help="of each response, 32 at least")
    parser.add_argument("--judge-slots", type=int, default=_JUDGE_SLOTS, help="programs judged at once")
    parser.add_argument("--store-milliseconds", type=float, default=0.0, help="added to every request to the object store")
    parser.add_argument("--home", type=Path, default=Path(".tttd-scale"), help="a folder that is not there yet")
    parser.add_argument("--out", type=Path, default=Path("docs/results/scale"))
    parser.add_argument("--keep", action="store_true", help="leave the home folder")
    options = parser.parse_args(arguments)
    if options.home.exists():
        parser.error(f"{options.home} is there already; a measurement begins with nothing. Remove it, or name another --home")
    if options.response_tokens < 32:
        parser.error(f"--response-tokens {options.response_tokens}: the program alone takes about 20; give at least 32")
    return options


def request_of(options: argparse.Namespace) -> dict[str, Any]:
    """The run's input."""
    return {
        "task": "noop",
        "model": MODEL,
        "train": options.train,
        "search": {"groups": options.groups, "rollouts": options.rollouts, "steps": options.steps},
        "sampling": {
            "max_new_tokens": options.response_tokens,
            "context_tokens": options.response_tokens + _PROMPT_TOKENS,
        },
        "lora": {"rank": 4, "alpha": 4},  # alpha / rank = 1, as the trainer's back-end takes it
        # A busy machine shall not be taken for a dead worker: attempts that are made again would be measured, too.
        "timeouts": {"heartbeat_seconds": 120, "judge_heartbeat_seconds": 120},
    }


async def measure(options: argparse.Namespace, fleet: Fleet) -> None:
    """Run it and follow it.

    Raises:
        RuntimeError: a process ended, the run failed, or no step ended for ten minutes.
    """
    name = f"scale-{options.groups}x{options.rollouts}"
    client = await connect_temporal(fleet.settings)
    follower = Follower(
        fleet,
        client,
        name,
        Measurement(
            command=command_line(options),
            hardware=hardware(),
            began=time.strftime("%Y-%m-%d", time.gmtime()),
            groups=options.groups,
            rollouts=options.rollouts,
            train=options.train == "on",
            response_tokens=options.response_tokens,
            judge_slots=options.judge_slots,
            store_milliseconds=options.store_milliseconds,
            judge_microseconds=judge_microseconds(),
            opening_seconds=0.0,
            steps=(),
        ),
        result_file(options),
    )
    handle: WorkflowHandle[Any, Any] = await client.start_workflow(
        names.DISCOVERY_RUN, request_of(options), id=names.run_workflow_id(name), task_queue=names.CONTROL_QUEUE
    )
    for step in range(1, options.steps + 1):
        await _wait_for(step, follower, handle)
        taken = await follower.take_step(step)
        cost = orchestration_ms(follower.measurement, taken)
        print(f"step {step}: {taken.wall_seconds:.1f} s, {cost:.1f} ms a rollout, load {taken.load:.2f}", flush=True)
    await handle.result()
    await follower.finish(tuple(step for step in _READ if step <= options.steps))


def command_line(options: argparse.Namespace) -> str:
    """The command that measures the same; where files lay then is left out."""
    parts = [f"--groups {options.groups} --rollouts {options.rollouts} --steps {options.steps}"]
    parts += [f"--train {options.train}"] if options.train == "off" else []
    parts += [f"--response-tokens {options.response_tokens}"] if options.response_tokens != _RESPONSE_TOKENS else []
    parts += [f"--judge-slots {options.judge_slots}"] if options.judge_slots != _JUDGE_SLOTS else []
    parts += [f"--store-milliseconds {options.store_milliseconds:g}"] if options.store_milliseconds else []
    return " ".join(["python -m scripts.scale", *parts])


def result_file(options: argparse.Namespace) -> Path:
    """Named for what differs from the defaults."""
    parts = [
        f"{options.groups}x{options.rollouts}x{options.steps}",
        *(["untrained"] if options.train == "off" else []),
        *([f"{options.response_tokens}-tokens"] if options.response_tokens != _RESPONSE_TOKENS else []),
        *([f"{options.store_milliseconds:g}-ms-store"] if options.store_milliseconds else []),
    ]
    path: Path = options.out / f"{'-'.join(parts)}.json"
    return path


async def _wait_for(step: int, follower: Follower, handle: WorkflowHandle[Any, Any]) -> None:
    end = asyncio.create_task(handle.result())
    deadline = time.monotonic() + _STALLED_SECONDS
    try:
        while not await asyncio.to_thread(follower.has_step, step):
            follower.fleet.check()
            if end.done():
                end.result()
                raise RuntimeError(f"the run ended before step {step}")
            if time.monotonic() > deadline:
                raise RuntimeError(
                    f"step {step} has not ended within {_STALLED_SECONDS:.0f} s; logs: {follower.fleet.settings.logs}"
                )
            await asyncio.sleep(_POLL_SECONDS)
    finally:
        end.cancel()


def main() -> int:
    options = parse()
    fleet = Fleet(
        options.home,
        response_tokens=options.response_tokens,
        judge_slots=options.judge_slots,
        store_seconds=options.store_milliseconds / 1000,
    )
    try:
        fleet.start()
        fleet.wait_for_engine()
        asyncio.run(measure(options, fleet))
    finally:
        fleet.stop()
    print("\n".join(tables([read(result_file(options))])))
    if not options.keep:
        shutil.rmtree(options.home)
    return 0


if __name__ == "__main__":
    leave(main())
