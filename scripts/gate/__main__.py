"""Measures how often the publish gate errs.

    python -m scripts.gate HOME RUN OTHER_RUN --updates 36 --name packing-bfloat16 --engine-dtype bfloat16
    python -m scripts.gate HOME RUN OTHER_RUN --updates 36 --name coder-sglang --engine http://127.0.0.1:30000

RUN and OTHER_RUN are runs of one task and model in HOME's store, with other seeds; both lend their grids. A trial takes a
real optimizer step on a part of a grid, serves its adapter and the wrong ones, and asks the gate. Steps come in short chains: they
start from version v and from what one to three steps made of it. Without --engine an embedded engine is started.
Results go to docs/results/gate/NAME.{json,md}; docs/numerics.md says what follows from them.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from activities.blobs import Blobs, LocalStore
from activities.engine_http import EngineClient
from activities.models import find_model
from activities.run_store import RunStore
from activities.train.backend import TrainerBackend
from activities.train.torch_backend import TorchBackend, TorchOptions
from scripts.gate.scratch import ScratchStore
from scripts.gate.serving import Answers, Engine
from scripts.gate.steps import Material, Update, chain, evidence_sets, read_material
from scripts.gate.tables import Trial, trial_of, write
from scripts.learning.runs import command_line, hardware
from workers.engine.launch import engine_launch
from workers.engine.process import launch_engine
from workers.ports import free_port
from workers.settings import Settings, load_settings


@dataclass
class Trials:
    """Trials under way."""

    backend: TrainerBackend
    engine: Engine
    evidence: int
    """Sets of it for each update."""
    found: list[Trial] = field(default_factory=list)
    updates: int = 0

    def add(self, update: Update, sibling: Update, stranger: Update) -> None:
        """One update before the gate, right and wrong."""
        sets = evidence_sets(self.backend, update, self.evidence)
        for factor in sorted({e.amplification for e in sets}):
            chosen = [(i, e) for i, e in enumerate(sets) if e.amplification == factor]
            decided = Answers(self.engine, update, [e for _, e in chosen], factor).decide(sibling, stranger)
            at = (update.material.store.run_id, update.material.step, update.number)
            for case, decisions in decided.items():
                self.found += [trial_of(*at, i, case, factor, d) for (i, _), d in zip(chosen, decisions, strict=True)]
        self.updates += 1


def main() -> int:
    arguments = _arguments()
    with tempfile.TemporaryDirectory(dir=arguments.scratch) as directory:
        scratch = ScratchStore(LocalStore(arguments.home / "store"), Path(directory) / "store")
        store = Blobs(scratch)

        def materials() -> list[list[Material]]:
            stores = (RunStore(store, run) for run in (arguments.run, arguments.other))
            return [read_material(one, arguments.learning_rate, draw_rewards=arguments.draw_rewards) for one in stores]

        spec = materials()[0][0].spec
        folder = find_model(spec.request.model, Settings(home=arguments.home).model_directories)
        options = TorchOptions(
            arguments.threads, arguments.device, arguments.device != "cpu", arguments.tokens_per_micro_batch, arguments.recompute
        )
        backend = TorchBackend(folder, spec.request.lora, options)
        about = {
            "model": Path(spec.request.model).name,
            "engine": arguments.engine_name or f"embedded, {arguments.engine_dtype}",
            "rate": f"{spec.request.optimizer.learning_rate:g}",
            "hardware": arguments.hardware or hardware(),
            "command": command_line("scripts.gate"),
        }
        with _engine(arguments, folder) as url:
            engine = Engine(EngineClient(url), RunStore(store, arguments.run), Path(directory) / "adapters")
            _run(Trials(backend, engine, arguments.evidence), materials, scratch, about, arguments)
    return 0


def _run(
    trials: Trials,
    materials: Callable[[], list[list[Material]]],
    scratch: ScratchStore,
    about: dict[str, str],
    arguments: argparse.Namespace,
) -> None:
    """Chains in pairs, one from either run at the same step, until there are enough updates or the time is up."""
    until = time.monotonic() + arguments.seconds
    for number in itertools.count():
        rng = random.Random(f"gate {arguments.seed} {number}")
        runs = materials()  # anew: what drawn rewards wrote went with the scratch store
        step = number % min(len(run) for run in runs)  # of every version alike
        chains = [chain(trials.backend, run[step], arguments.chain, arguments.parts, rng) for run in runs]
        for pairs in zip(*chains, strict=True):
            for (update, sibling), (stranger, _) in (pairs, pairs[::-1]):
                trials.add(update, sibling, stranger)
                if arguments.siblings:
                    trials.add(sibling, update, stranger)
            _say(trials.updates, arguments.updates, trials.found)
            # After every pair, so that a command that is cut off leaves what it had.
            write(arguments.out, arguments.name, trials.found, {**about, "updates": str(trials.updates)})
            if trials.updates >= arguments.updates or time.monotonic() > until:
                return
        scratch.clear()
        trials.engine.forget()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("home", type=Path, help="the runs' TTTD_HOME")
    parser.add_argument("run")
    parser.add_argument("other", help="another run of the same task and model")
    parser.add_argument("--updates", type=int, default=36, help="single optimizer steps to try")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop then, with what there is")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--learning-rate", type=float, help="of the steps tried; default: the runs' own")
    parser.add_argument("--draw-rewards", action="store_true", help="at random, in the judge's stead: for models of random weights")
    parser.add_argument("--parts", type=int, default=16, help="that a grid is cut into; each is one step's grid")
    parser.add_argument("--chain", type=int, default=4, help="steps one after the other; takes two parts each")
    parser.add_argument("--no-siblings", dest="siblings", action="store_false", help="use siblings as impostors only")
    parser.add_argument("--evidence", type=int, default=6, help="sets of evidence for each step, without common sequences")
    parser.add_argument("--name", required=True, help="of the result's files")
    parser.add_argument("--out", type=Path, default=Path("docs/results/gate"))
    parser.add_argument("--scratch", type=Path, help="folder for the steps' adapters; default: the system's")
    parser.add_argument("--engine", help="URL of a running engine that can read this machine's files")
    parser.add_argument("--engine-name", help="what the report calls it")
    parser.add_argument("--engine-dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of the embedded engine")
    parser.add_argument("--device", default="cpu", help="of the trainer; not cpu: in bfloat16")
    parser.add_argument("--tokens-per-micro-batch", type=int, default=2048)
    parser.add_argument("--recompute", action="store_true")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--hardware", help="what the report says; default: this machine's processor")
    arguments = parser.parse_args()
    if arguments.parts < 2 * arguments.chain:
        parser.error(f"--chain {arguments.chain} takes {2 * arguments.chain} parts, and --parts is {arguments.parts}")
    return arguments


@contextmanager
def _engine(arguments: argparse.Namespace, folder: Path) -> Iterator[str]:
    if arguments.engine:
        yield arguments.engine
        return
    settings = load_settings().model_copy(update={"home": arguments.home, "engine_threads": arguments.threads})
    launch = engine_launch(settings, folder, settings.engine_port or free_port(settings.engine_host))
    dtype = ["--dtype", arguments.engine_dtype] if settings.engine_kind == "embedded" else []
    log = arguments.home / "logs" / "gate-engine.log"
    process = launch_engine(replace(launch, command=[*launch.command, *dtype]), log)
    try:
        asyncio.run(process.ready())
        yield launch.url
    finally:
        process.stop()


def _say(done: int, of: int, trials: list[Trial]) -> None:
    wrong = sum(t.is_wrong for t in trials)
    print(f"{time.strftime('%H:%M:%S')} {done}/{of} updates, {len(trials)} trials, {wrong} wrong", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
