"""Measures how often the publish gate errs.

    python -m scripts.gate HOME RUN OTHER_RUN --updates 200 --name packing-bfloat16 --engine-dtype bfloat16
    python -m scripts.gate HOME RUN OTHER_RUN --updates 200 --name coder-sglang --engine http://127.0.0.1:30000

RUN and OTHER_RUN are trained runs of one task and model in HOME's store, with other seeds. A trial takes a real optimizer step on a
random half of one of RUN's grids, serves its adapter and the wrong ones, and asks the gate. Without --engine an embedded engine
is started. Results go to docs/results/gate/NAME.{json,md}; docs/numerics.md says what follows from them.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from activities.blobs import Blobs, LocalStore
from activities.engine_http import EngineClient
from activities.models import find_model
from activities.records import RunStore
from activities.train.torch_backend import TorchBackend, TorchOptions
from scripts.gate.serving import Engine, judge
from scripts.gate.steps import Material, Update, read_material, split, take_step
from scripts.gate.tables import Trial, trial_of, write
from scripts.learning.runs import command_line, hardware
from workers.engine.process import embedded_command, free_port, start_engine
from workers.settings import Settings


def main() -> int:
    arguments = _arguments()
    store = Blobs(LocalStore(arguments.home / "store"))
    own, other = (read_material(RunStore(store, run)) for run in (arguments.run, arguments.other))
    spec = own[0].spec
    folder = find_model(spec.request.model, Settings(home=arguments.home).model_directories)
    options = TorchOptions(threads=arguments.threads, device=arguments.device, bfloat16=arguments.device != "cpu")
    backend = TorchBackend(folder, spec.request.lora, options)
    about = {
        "model": Path(spec.request.model).name,
        "engine": arguments.engine_name or f"embedded, {arguments.engine_dtype}",
        "rate": f"{spec.request.optimizer.learning_rate:g}",
        "hardware": arguments.hardware or hardware(),
        "command": command_line("scripts.gate"),
    }
    trials: list[Trial] = []
    with _engine(arguments, folder) as url, tempfile.TemporaryDirectory() as directory:
        engine = Engine(EngineClient(url), RunStore(store, arguments.run), Path(directory))
        rng = random.Random(f"strangers {arguments.seed}")
        strangers = [take_step(backend, material, split(material, rng)[0]) for material in other]
        for number in range(0, arguments.updates, 2):
            trials += _pair(engine, backend, own, strangers, random.Random(f"gate {arguments.seed} {number}"))
            _say(number + 2, arguments.updates, trials)
            # After every pair, so that a command that is cut off leaves what it had.
            write(arguments.out, arguments.name, trials, about)
    return 0


def _pair(engine: Engine, backend: TorchBackend, own: list[Material], strangers: list[Update], rng: random.Random) -> list[Trial]:
    """Two updates from one version on disjoint halves of its grid: each is the other's sibling."""
    material = rng.choice(own)
    updates = [take_step(backend, material, half) for half in split(material, rng)]
    trials = []
    for update, sibling in (updates, updates[::-1]):
        results = judge(engine, update, sibling, _like(strangers, material.step))
        trials += [trial_of(material.store.run_id, material.step, case, result) for case, result in results.items()]
    return trials


def _like(strangers: list[Update], step: int) -> Update:
    """The other run's update of the same step, or of its last one."""
    return next((u for u in strangers if u.material.step == step), strangers[-1])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("home", type=Path, help="the runs' TTTD_HOME")
    parser.add_argument("run")
    parser.add_argument("other", help="another run of the same task and model")
    parser.add_argument("--updates", type=int, default=200, help="single optimizer steps to try, two from each grid drawn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--name", required=True, help="of the result's files")
    parser.add_argument("--out", type=Path, default=Path("docs/results/gate"))
    parser.add_argument("--engine", help="URL of a running engine that can read this machine's files")
    parser.add_argument("--engine-name", help="what the report calls it")
    parser.add_argument("--engine-dtype", choices=("float32", "bfloat16"), default="bfloat16", help="of the embedded engine")
    parser.add_argument("--device", default="cpu", help="of the trainer; not cpu: in bfloat16")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--hardware", help="what the report says; default: this machine's processor")
    return parser.parse_args()


@contextmanager
def _engine(arguments: argparse.Namespace, folder: Path) -> Iterator[str]:
    if arguments.engine:
        yield arguments.engine
        return
    settings = Settings(home=arguments.home, engine_threads=arguments.threads)
    port = free_port(settings.engine_host)
    url = f"http://{settings.engine_host}:{port}"
    command = [*embedded_command(settings, folder, port), "--dtype", arguments.engine_dtype]
    process = start_engine(command, url, arguments.home / "logs" / "gate-engine.log")
    try:
        asyncio.run(process.ready())
        yield url
    finally:
        process.stop()


def _say(done: int, of: int, trials: list[Trial]) -> None:
    wrong = sum(t.passed != (t.case == "right") for t in trials)
    print(f"{done}/{of} updates, {len(trials)} trials, {wrong} wrong", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
