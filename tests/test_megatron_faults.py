"""Ranks that die, hang or fail, and a train worker that is killed: the attempt fails, the next one completes, effects once."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from activities.blobs import Blobs
from activities.errors import TrainerLost
from activities.open.identity_adapter import make_initial_policy
from activities.records import TrainRecord
from activities.train import stepping
from activities.train.backend import ScoredSequence, TrainerBackend, TrainerState
from activities.train.fake import FakeSearch, make_model
from activities.train.megatron.backend import MegatronBackend
from activities.train.megatron.options import MegatronOptions
from activities.train.megatron.shape import read_shape
from activities.train.megatron.sharding import adapter_shapes
from activities.train.training import Trainer
from workflows.contracts.request import LoraSettings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

LORA = LoraSettings(rank=4, alpha=8)
TWO_RANKS = MegatronOptions(tensor_parallel=2, tokens_per_micro_batch=48, stall_seconds=15)
ONE_RANK = MegatronOptions(tokens_per_micro_batch=48)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model") / "qwen2")


def gone(pids: list[int], seconds: float = 20.0) -> bool:
    """Whether all processes have ended within that time; zombies have."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(_runs(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


class Watched:
    """A trainer, and the back-ends that it has made."""

    def __init__(self, search: FakeSearch, options: MegatronOptions) -> None:
        self.made: list[MegatronBackend] = []
        self._options = options
        clock = itertools.count()
        self.trainer = Trainer(search.store.blobs, lambda _: search.folder, self._make, lambda: float(next(clock)))

    def _make(self, folder: Path, lora: LoraSettings) -> TrainerBackend:
        self.made.append(MegatronBackend(folder, lora, self._options))
        return self.made[-1]


@pytest.fixture
def search(blobs: Blobs, model: Path) -> FakeSearch:
    return FakeSearch.open(blobs, model, optimizer={"learning_rate": 3e-3})


@pytest.fixture
def watched(search: FakeSearch, request: pytest.FixtureRequest) -> Iterator[Watched]:
    made = Watched(search, request.param)
    yield made
    made.trainer.close()


@pytest.mark.parametrize("watched", [TWO_RANKS], indirect=True)
def test_a_rank_killed_in_the_middle_of_a_step(search: FakeSearch, watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attempt fails, all ranks go, new ones complete the step, and it is the step that would have been made anyway."""
    policy = make_initial_policy(search.store, search.spec, search.folder)
    request = search.request(1, search.sample(1, policy), policy)
    real, calls = stepping.loss_gradient, itertools.count()

    def kill_in_between(*arguments: Any) -> Any:
        if next(calls) == 3:  # micro-batches lie behind it and before it
            os.kill(watched.made[0].pids[1], signal.SIGKILL)
        return real(*arguments)

    monkeypatch.setattr(stepping, "loss_gradient", kill_in_between)
    with pytest.raises(TrainerLost, match="trainer rank") as failure:
        watched.trainer.train(request)
    assert failure.value.retryable
    first = watched.made[0].pids
    assert gone(first)
    assert search.store.find(search.store.step_key(1, "train")) is None
    trained = watched.trainer.train(request)
    assert len(watched.made) == 1
    assert set(watched.made[0].pids).isdisjoint(first)
    assert next(calls) > 4
    # Once: a third attempt returns the same record, and another run from the same inputs makes the same adapter.
    assert watched.trainer.train(request) == trained
    other = FakeSearch.open(search.store.blobs, search.folder, run_id="other", optimizer={"learning_rate": 3e-3})
    again = watched.trainer.train(other.request(1, request.batch, policy))
    assert (again.policy.checkpoint, again.policy.gate) == (trained.policy.checkpoint, trained.policy.gate)
    # The base model has stayed in the same processes, and the next step goes on from the state that they hold.
    pids = watched.made[0].pids
    second = watched.trainer.train(search.request(2, search.sample(2, trained.policy), trained.policy))
    assert watched.made[0].pids == pids
    assert search.store.load(TrainRecord, second.record).base == trained.policy.checkpoint


@pytest.mark.parametrize("watched", [ONE_RANK], indirect=True)
def test_ranks_that_died_idle_never_train_from_an_empty_adapter(search: FakeSearch, watched: Watched) -> None:
    """Between two steps the ranks vanish and come back for something else, without the state that the trainer thinks they hold."""
    policy = make_initial_policy(search.store, search.spec, search.folder)
    trained = watched.trainer.train(search.request(1, search.sample(1, policy), policy))
    for pid in watched.made[0].pids:
        os.kill(pid, signal.SIGKILL)
    assert gone(watched.made[0].pids)
    request = search.request(2, search.sample(2, trained.policy), trained.policy)
    watched.made[0].log_probs([ScoredSequence((1, 2, 3), 1)], adapter=False)  # as scoring a group under the base does
    with pytest.raises(TrainerLost, match="hold no adapter"):
        watched.trainer.train(request)
    second = watched.trainer.train(request)
    record = search.store.load(TrainRecord, second.record)
    assert record.metrics["gap_engine_trainer_rms"] < 1e-4, "trained under another policy than the one that sampled"


def test_a_hung_rank_is_ended_with_the_others(model: Path) -> None:
    backend = MegatronBackend(model, LORA, TWO_RANKS)
    try:
        pids = backend.pids
        sequences = [ScoredSequence((1, 2, 3, 4), 1)]
        expected = backend.log_probs(sequences, adapter=False)
        os.kill(pids[1], signal.SIGSTOP)
        with pytest.raises(TrainerLost):
            backend.log_probs(sequences, adapter=False)
        assert gone(pids)
        np.testing.assert_array_equal(backend.log_probs(sequences, adapter=False)[0], expected[0])
    finally:
        backend.close()


def test_a_failing_derivative_ends_the_ranks_that_wait_for_it(model: Path) -> None:
    backend = MegatronBackend(model, LORA, ONE_RANK)
    try:
        rng = np.random.default_rng(0)
        shapes = adapter_shapes(read_shape(model), LORA)
        state = TrainerState({k: rng.standard_normal(s).astype(np.float32) for k, s in shapes.items()})
        backend.load(state)

        def fail(index: int, log_probs: Any) -> Any:
            raise ZeroDivisionError

        pids = backend.pids
        with pytest.raises(ZeroDivisionError):
            backend.accumulate([ScoredSequence((1, 2, 3, 4), 1)], fail)
        assert gone(pids)
        backend.load(state)
        assert backend.log_probs([ScoredSequence((1, 2), 1)], adapter=True)[0].size == 1
    finally:
        backend.close()


WORKER = """
import sys, threading, time
from pathlib import Path
from activities.train.megatron.backend import MegatronBackend
from activities.train.megatron.options import MegatronOptions
from workflows.contracts.request import LoraSettings

def work():
    options = MegatronOptions(tensor_parallel=2, folder=Path(sys.argv[2]))
    backend = MegatronBackend(Path(sys.argv[1]), LoraSettings(rank=4, alpha=8), options)
    print(*backend.pids, flush=True)

thread = threading.Thread(target=work)  # it ends before the process does: the ranks must not
thread.start()
thread.join()
time.sleep(1)
print("still here", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("stopped", [False, True], ids=["running", "one rank stopped"])
def test_a_killed_worker_leaves_no_rank_behind(model: Path, tmp_path: Path, stopped: bool) -> None:
    with subprocess.Popen([sys.executable, "-c", WORKER, str(model), str(tmp_path)], stdout=subprocess.PIPE, text=True) as worker:
        assert worker.stdout is not None
        pids = [int(word) for word in worker.stdout.readline().split()]
        assert len(pids) == 2
        assert worker.stdout.readline() == "still here\n"
        assert not gone(pids, seconds=0.2)
        if stopped:
            os.kill(pids[0], signal.SIGSTOP)
        worker.kill()
    assert gone(pids)
