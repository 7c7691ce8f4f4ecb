"""Publishing against an engine that computes with the real back-end and can be told to lie."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from activities.blobs import Blobs, LocalStore
from activities.engine_http import Generation, Sampling
from activities.errors import EngineError, InputError, NotReady, PublishRefused
from activities.open.identity_adapter import make_initial_policy
from activities.publish.placing import materialise
from activities.publish.publishing import Publisher, Versions
from activities.records import AdapterManifest
from activities.run_store import RunStore
from activities.train.backend import ScoredSequence, TrainerState
from activities.train.evidence import amplify
from activities.train.fake import FakeSearch, make_model
from activities.train.torch_backend import TorchBackend
from activities.train.training import Trainer
from workflows.contracts.base import PolicyRef

pytestmark = pytest.mark.slow
_PASSING = re.compile(r"-(x\d+|again)$")


@dataclass
class LyingEngine:
    """Serves PEFT directories through the trainer's arithmetic; `instead` names what is really served under a name."""

    backend: TorchBackend
    adapters: dict[str, str] = field(default_factory=dict)
    instead: dict[str, str | None] = field(default_factory=dict)
    only_names: bool = False
    alpha: float = 8.0
    """Of the fake runs' configurations."""
    noise: float = 0.0
    refuses_zero: bool = False
    boots: int = 0
    loads: list[str] = field(default_factory=list)
    passing: list[str] = field(default_factory=list)
    """Loads for a proof, under names of their own."""
    die_after: int | None = None
    """Requests after which the process is replaced by a fresh one."""
    requests: int = 0

    def boot_id(self) -> str:
        return f"boot-{self.boots}"

    def load_adapter(self, name: str, directory: str) -> None:
        if name in self.adapters:
            raise EngineError(f"{name} is already loaded")
        self.adapters[name] = directory
        (self.passing if _PASSING.search(name) else self.loads).append(name)

    def unload_adapter(self, name: str) -> None:
        if name not in self.adapters:
            raise EngineError(f"{name} is not loaded")
        del self.adapters[name]

    def loaded_adapters(self) -> dict[str, str]:
        return dict(self.adapters)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sampling,
        *,
        adapter: str | None = None,
        base: bool = False,
        prompt_log_probs: bool = False,
        timeout_seconds: float = 3600.0,
    ) -> list[Generation]:
        assert base == (adapter is None)
        assert prompt_log_probs
        self.requests += 1
        if self.requests == self.die_after:
            self.boots, self.adapters = self.boots + 1, {}
        if self.refuses_zero and sampling.max_new_tokens == 0:
            raise EngineError("HTTP 400: max_new_tokens must be positive")
        if adapter is not None and adapter not in self.adapters:
            raise EngineError(f"HTTP 400: {adapter} is not loaded")
        return [self._answer(row) for row in self._score(prompts, self._really(adapter), self._alpha(adapter))]

    def _really(self, adapter: str | None) -> str | None:
        """What is served; a lie about a name is one about its files as well, unless it is `only_names`."""
        if self.only_names or adapter in self.instead:
            return self.instead.get(adapter or "", adapter)
        return self.instead.get(_PASSING.sub("", adapter or ""), adapter)

    def _alpha(self, adapter: str | None) -> float:
        """As the asked adapter's configuration says, over the run's own."""
        if adapter is None:
            return 1.0
        config = json.loads((Path(self.adapters[adapter]) / "adapter_config.json").read_text())
        return float(config["lora_alpha"]) / self.alpha

    def _score(self, prompts: Sequence[Sequence[int]], adapter: str | None, factor: float) -> list[np.ndarray]:
        if adapter is not None:
            directory = self.adapters.get(adapter, adapter)  # a lie may also be a directory
            file = Path(directory) / "adapter_model.safetensors"
            self.backend.load(amplify(TrainerState(safetensors.numpy.load(file.read_bytes())), factor))
        sequences = [ScoredSequence(tuple(p), 1) for p in prompts]
        rows = self.backend.log_probs(sequences, adapter=adapter is not None)
        rng = np.random.default_rng(self.requests)
        return [row + self.noise * rng.standard_normal(row.size) for row in rows]

    def _answer(self, row: np.ndarray) -> Generation:
        return Generation((), (), "", "length", tuple(row.tolist()), {})


@dataclass
class Run:
    store: RunStore
    policies: list[PolicyRef]
    strangers: list[PolicyRef]
    search: FakeSearch

    def versions(self, version: int) -> Versions:
        return Versions(self.policies[version], self.policies[version - 1] if version else None, self.policies[0])


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    root = tmp_path_factory.mktemp("publishing")
    blobs, model = Blobs(LocalStore(root / "store")), make_model(root / "model")
    histories = []
    for seed in (0, 1):
        search = FakeSearch.open(blobs, model, run_id=f"run{seed}", seed=seed, optimizer={"learning_rate": 3e-3})
        counter = itertools.count()
        trainer = Trainer(blobs, lambda _: model, TorchBackend, lambda c=counter: float(next(c)))  # type: ignore[misc]
        policies = [make_initial_policy(search.store, search.spec, model)]
        for step in range(1, 5 if seed == 0 else 3):
            batch = search.sample(step, policies[-1], groups=3, rollouts=6, response_tokens=16, seed=seed)
            policies.append(trainer.train(search.request(step, batch, policies[-1])).policy)
        histories.append((search, policies))
    (search, policies), (_, strangers) = histories
    return Run(search.store, policies, strangers, search)


@pytest.fixture
def engine(run: Run) -> LyingEngine:
    return LyingEngine(run.search.backend)


@pytest.fixture
def publisher(run: Run, engine: LyingEngine, tmp_path: Path) -> Publisher:
    counter = itertools.count()
    return Publisher(
        blobs=run.store.blobs,
        engine="one",
        api=engine,
        boot_id=engine.boot_id,
        directory=tmp_path / "adapters",
        clock=lambda: float(next(counter)),
    )


# What passes --------------------------------------------------------------------------------------------------------------
def test_versions_are_published_one_after_the_other(run: Run, engine: LyingEngine, publisher: Publisher) -> None:
    """v0, then each step; only v0, the previous and the new version stay loaded."""
    gone: list[str] = []
    publisher.on_unloaded = gone.extend
    for version in range(5):
        report = publisher.publish(run.store, run.versions(version))
        assert report.passed
        assert (report.engine, report.boot_id, report.version) == ("one", "boot-0", version)
        kept = {0, max(0, version - 1), version}
        assert set(engine.adapters) == {run.policies[v].name for v in kept}
    assert engine.loads == [p.name for p in run.policies]  # each was loaded once
    assert [name for name in gone if not _PASSING.search(name)] == [run.policies[v].name for v in (1, 2)]
    assert sorted(name for name in gone if _PASSING.search(name)) == sorted(engine.passing)
    assert {d.name for d in publisher.directory.iterdir()} == set(engine.adapters)
    assert [c.against for c in report.comparisons] == ["previous", "initial"]


def test_a_loaded_version_is_proved_again(run: Run, engine: LyingEngine, publisher: Publisher) -> None:
    first = publisher.publish(run.store, run.versions(1))
    asked = engine.requests
    again = publisher.publish(run.store, run.versions(1))
    assert engine.requests > asked
    assert engine.loads == [p.name for p in run.policies[:2]]
    assert again.comparisons == first.comparisons


def test_a_restarted_engine_gets_all_adapters_back(run: Run, engine: LyingEngine, publisher: Publisher) -> None:
    publisher.publish(run.store, run.versions(3))
    engine.boots, engine.adapters = 1, {}
    report = publisher.publish(run.store, run.versions(3))
    assert report.boot_id == "boot-1"
    assert set(engine.adapters) == {run.policies[v].name for v in (0, 2, 3)}


def test_other_runs_and_later_versions_stay_loaded(run: Run, engine: LyingEngine, publisher: Publisher) -> None:
    """A late retry of an old step must not take away what came after it, nor anything of another run."""
    for policy in (run.strangers[1], run.policies[1], run.policies[4]):
        engine.load_adapter(policy.name, str(materialise(run.store.blobs, policy.adapter, publisher.directory, policy.name)))
    publisher.publish(run.store, run.versions(3))
    assert run.strangers[1].name in engine.adapters
    assert run.policies[4].name in engine.adapters
    assert run.policies[1].name not in engine.adapters


def test_an_engine_that_wants_a_new_token_gets_one(run: Run, engine: LyingEngine, publisher: Publisher) -> None:
    engine.refuses_zero = True
    assert publisher.publish(run.store, run.versions(1)).passed


def test_version_zero_passes_on_a_noisy_engine(run: Run, engine: LyingEngine, publisher: Publisher) -> None:
    engine.noise = 0.06
    assert publisher.publish(run.store, run.versions(0)).passed


# What is refused ----------------------------------------------------------------------------------------------------------
def test_nothing_applied_is_refused_and_unloaded(run: Run, engine: LyingEngine, publisher: Publisher) -> None:
    engine.instead = {p.name: None for p in run.policies}
    with pytest.raises(PublishRefused, match=r"looks like no adapter is applied.*slope 0\.00.*Report: blob [0-9a-f]{64}"):
        publisher.publish(run.store, run.versions(2))
    assert run.policies[2].name not in engine.adapters
    engine.instead = {}
    assert publisher.publish(run.store, run.versions(2)).passed


def test_the_previous_version_is_refused(run: Run, engine: LyingEngine, publisher: Publisher) -> None:
    engine.instead = {run.policies[3].name: run.policies[2].name}
    with pytest.raises(PublishRefused, match="looks like the previous version is served under the new name"):
        publisher.publish(run.store, run.versions(3))


@pytest.mark.parametrize("version", [1, 2])
def test_another_runs_adapter_is_refused(run: Run, engine: LyingEngine, publisher: Publisher, version: int) -> None:
    stranger = run.strangers[version]
    engine.instead = {run.policies[version].name: str(materialise(run.store.blobs, stranger.adapter, publisher.directory, "x"))}
    with pytest.raises(PublishRefused, match="another adapter"):
        publisher.publish(run.store, run.versions(version))


@pytest.mark.parametrize(
    ("served", "cause"),
    [
        ("initial", "no adapter is applied, or version 0 is served under the new name"),
        ("previous", "the previous version is served under the new name"),
        ("stranger", "another adapter under the new name: it lies"),
    ],
)
@pytest.mark.parametrize("noise", [0.0, 1e-3])
def test_a_name_that_serves_other_files_than_its_own_is_refused(
    run: Run, engine: LyingEngine, publisher: Publisher, served: str, cause: str, noise: float
) -> None:
    """The files are right, and so is what the engine makes of them, amplified: only the name is not theirs."""
    other = materialise(run.store.blobs, run.strangers[2].adapter, publisher.directory, "x")
    lies = {"initial": run.policies[0].name, "previous": run.policies[2].name, "stranger": str(other)}
    engine.instead, engine.only_names, engine.noise = {run.policies[3].name: lies[served]}, True, noise
    with pytest.raises(PublishRefused, match=cause) as refused:
        publisher.publish(run.store, run.versions(3))
    assert "outside" not in str(refused.value), "the weights themselves are proved"


def test_a_proof_that_was_cut_off_leaves_nothing_behind(run: Run, engine: LyingEngine, publisher: Publisher) -> None:
    publisher.publish(run.store, run.versions(1))
    assert engine.passing
    left = engine.passing[0]
    engine.load_adapter(left, str(publisher.directory / run.policies[1].name))
    (publisher.directory / left).mkdir()
    publisher.publish(run.store, run.versions(1))
    assert set(engine.adapters) == {p.name for p in run.policies[:2]}
    assert {d.name for d in publisher.directory.iterdir()} == set(engine.adapters)


def test_the_report_says_how_much_of_the_step_is_served(run: Run, engine: LyingEngine, publisher: Publisher) -> None:
    report = publisher.publish(run.store, run.versions(2))
    assert report.amplification > 1
    assert report.served_share == pytest.approx(1.0, abs=0.02)  # an engine in float32 serves all of it
    assert report.name_gap == 0.0
    assert report.engine_gap == pytest.approx(0.0, abs=1e-4)


def test_a_version_zero_that_changes_something_is_refused(run: Run, engine: LyingEngine, publisher: Publisher) -> None:
    trained = materialise(run.store.blobs, run.policies[1].adapter, publisher.directory, "x")
    engine.instead = {run.policies[0].name: str(trained)}
    with pytest.raises(PublishRefused, match="version 0 must equal the base"):
        publisher.publish(run.store, run.versions(0))


def test_a_version_zero_with_a_trained_b_is_no_version_zero(run: Run, publisher: Publisher) -> None:
    wrong = run.policies[0].model_copy(update={"adapter": run.policies[1].adapter})
    with pytest.raises(InputError, match="lora_B is not zero"):
        publisher.publish(run.store, Versions(wrong, None, wrong))


@pytest.mark.parametrize("after", [1, 2, 4])
def test_a_restart_in_the_middle_is_noticed(run: Run, engine: LyingEngine, publisher: Publisher, after: int) -> None:
    engine.die_after = after
    with pytest.raises(NotReady, match="boot boot-0 -> boot-1"):
        publisher.publish(run.store, run.versions(2))
    assert publisher.publish(run.store, run.versions(2)).boot_id == "boot-1"


def test_an_engine_that_forgets_what_it_loaded_is_an_error(run: Run, engine: LyingEngine, publisher: Publisher) -> None:
    engine.load_adapter = lambda name, directory: None  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="lists only nothing"):
        publisher.publish(run.store, run.versions(0))


def test_versions_must_follow_each_other(run: Run) -> None:
    zero, one, two, three = run.policies[:4]
    for policy, previous, initial in ((two, zero, zero), (three, None, zero), (two, one, one), (one, zero, two)):
        with pytest.raises(InputError, match="version"):
            Versions(policy, previous, initial)


# Placing ------------------------------------------------------------------------------------------------------------------
def test_a_torn_directory_is_written_anew(run: Run, tmp_path: Path) -> None:
    policy = run.policies[1]
    directory = materialise(run.store.blobs, policy.adapter, tmp_path, policy.name)
    weights = directory / "adapter_model.safetensors"
    whole = weights.read_bytes()
    stamp = weights.stat().st_mtime_ns
    materialise(run.store.blobs, policy.adapter, tmp_path, policy.name)
    assert weights.stat().st_mtime_ns == stamp  # a whole one is left alone
    weights.write_bytes(whole[: len(whole) // 2])
    materialise(run.store.blobs, policy.adapter, tmp_path, policy.name)
    assert weights.read_bytes() == whole
    assert run.store.blobs.get(run.store.load(AdapterManifest, policy.adapter).weights) == whole
    assert [p.name for p in tmp_path.iterdir()] == [policy.name]


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden"])
def test_names_cannot_leave_the_directory(run: Run, tmp_path: Path, name: str) -> None:
    with pytest.raises(InputError, match="not a plain folder name"):
        materialise(run.store.blobs, run.policies[0].adapter, tmp_path, name)
