"""How often does the publish gate err on this machine's engine? Two runs lend their grids, `python -m scripts.gate` tries steps.

The runs may train at a higher rate than the steps that are tried: `--set optimizer.learning_rate=...` is theirs, the steps' rate is
the profile's own or the one that `--gate` names (arguments passed on to scripts.gate).
"""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from scripts.gpu.doctor_and_gate import first_engine, gate_numbers
from scripts.gpu.lab import Lab, hardware

SEEDS = (1, 2)


def experiment(lab: Lab) -> None:
    """Both runs at once, then the trials on the engine that served them."""
    lab.up()
    with ThreadPoolExecutor(len(SEEDS)) as pool:
        runs = list(pool.map(lambda seed: lab.run(f"rates-{seed}", f"seed={seed}"), SEEDS))
    lab.keep("runs", {run.run_id: gate_numbers(lab, run) for run in runs})
    for run in runs:
        lab.metrics(run.run_id)
    host = hardware()
    where = ", ".join(host["gpus"]) or f"{host['cores']} cores {host['cpu']}"
    engine = f"SGLang {lab.engine_version}" if lab.engine_version else "embedded"
    name = f"{lab.wish.model}-{lab.settings.engine_kind}"
    command = [sys.executable, "-m", "scripts.gate", str(lab.wish.home), *(run.run_id for run in runs), "--name", name]
    command += ["--engine", first_engine(lab).url, "--engine-name", engine]
    command += ["--device", lab.settings.train_device, "--hardware", where, "--out", str(lab.wish.out), *lab.wish.gate]
    subprocess.run(command, check=True)
    lab.keep("trials", f"{name}.json")
    lab.down()
