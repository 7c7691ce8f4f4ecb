"""Whole rollouts from a real engine: a response in two phases is stored once, and the trainer finds the same log-probs in it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from temporalio.exceptions import ApplicationError
from temporalio.testing import ActivityEnvironment

from activities.blobs import Blobs, digest_of
from activities.engine_http import AsyncEngineClient
from activities.fleet import read_notice, write_notice
from activities.open.identity_adapter import make_initial_policy
from activities.publish.placing import materialise
from activities.records import (
    Batch,
    BatchRow,
    EngineNotice,
    Node,
    ParentPick,
    PlannedGroup,
    RolloutRecord,
    StepPlan,
    Verdict,
    canonical_json,
)
from activities.sample.activity import SampleActivities
from activities.sample.pool import EnginePool
from activities.sample.prompt import render_prompt
from activities.sample.sampling import views
from activities.sample.thinking import SPENT
from activities.sample.tokens import RESERVE_TOKENS, codec_for
from activities.train.fake import FakeSearch, make_model
from activities.train.stepping import StepInputs, train_step
from tasks.registry import TaskSource, load_task
from tests.chat_styles import Style, write_style
from workers.engine.embedded.model import load_model
from workers.engine.embedded.server import EngineOptions, EngineServer
from workflows.contracts.base import Coordinate, Outcome, PolicyRef
from workflows.contracts.messages import Sampled, SampleRequest
from workflows.contracts.request import SamplingSettings

TASK = "circle_packing_26"
PARENT = Node(
    id="p",
    step=0,
    value=2.0,
    score=2.0,
    code="def run_packing():\n    print('<|im_end|>')  # </think>\n",
    construction=None,
    output_tail="<|im_end|>\n",
)
THINKING, ANSWER = 24, 200
"""Tokens: how long a response may think, and what its context has room for after that."""


class LocalPool(EnginePool):
    """The real pool, but for the wire: requests reach the engine inside this process."""

    def __init__(self, blobs: Blobs, app: Any) -> None:
        super().__init__(blobs, time.time)
        self.timeouts: list[float] = []
        self._engine = AsyncEngineClient("http://engine", transport=_Noting(app, self.timeouts))

    def client(self, notice: EngineNotice) -> AsyncEngineClient:
        return self._engine


class _Noting(httpx.ASGITransport):
    def __init__(self, app: Any, timeouts: list[float]) -> None:
        super().__init__(app)
        self._timeouts = timeouts

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        self._timeouts.append(request.extensions["timeout"]["read"])
        return await super().handle_async_request(request)


@dataclass
class Room:
    """One run, its engine and the sample room."""

    search: FakeSearch
    style: Style
    policy: PolicyRef
    pool: LocalPool
    activities: SampleActivities
    plan: str

    async def sample(self, rollout: int, seconds: float = 60.0) -> Sampled:
        request = SampleRequest(
            run=self.search.ref, at=Coordinate(step=1, group=0, rollout=rollout), plan=self.plan, policy=self.policy
        )
        environment = ActivityEnvironment()
        limit = timedelta(seconds=seconds)
        environment.info = replace(environment.info, start_to_close_timeout=limit, schedule_to_close_timeout=None)
        found: Sampled = await environment.run(self.activities.sample, request)
        return found

    def record(self, sampled: Sampled) -> RolloutRecord:
        return self.search.store.load(RolloutRecord, sampled.rollout)


def with_sampling(search: FakeSearch, **changes: Any) -> FakeSearch:
    sampling = SamplingSettings.model_validate(search.spec.request.sampling.model_dump() | changes)
    request = search.spec.request.model_copy(update={"sampling": sampling})
    return replace(search, spec=search.spec.model_copy(update={"request": request}))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_model(tmp_path_factory.mktemp("model") / "qwen3", vocabulary=288)
    write_style(folder, "qwen3-thinking")
    return folder


@pytest.fixture
async def room(blobs: Blobs, folder: Path, tmp_path: Path) -> AsyncIterator[Room]:
    search = FakeSearch.open(blobs, folder, seed=5, search={"rollouts": 3})
    spec = search.spec.model_copy(update={"task": TASK})
    length = len(codec_for(folder).encode(render_prompt(*views(spec, load_task(TASK), PARENT))))
    limits = {"max_new_tokens": 700, "thinking_tokens": length + THINKING, "context_tokens": length + THINKING + ANSWER}
    search = with_sampling(replace(search, spec=spec), **limits)
    policy = make_initial_policy(search.store, search.spec, folder)
    options = EngineOptions(str(folder), decode="batched", threads=1, dtype="float32", device="cpu", max_batch=8)
    server = EngineServer(load_model(folder), options)
    pool = LocalPool(blobs, server.app())
    adapter = materialise(blobs, policy.adapter, tmp_path / "adapters", policy.name)
    await pool._engine.load_adapter(policy.name, str(adapter))
    write_notice(
        blobs,
        EngineNotice(
            engine="one",
            url="http://engine",
            boot_id="boot",
            model_digest=search.spec.model_digest,
            verified={policy.name: 0},
            updated=time.time(),
            repeatable=True,
        ),
    )
    pick = ParentPick(node="p", visits=0, q=0.0, prior=1.0, bonus=0.0, score=0.0)
    group = PlannedGroup(group=0, pick=pick, parent=PARENT)
    plan = search.store.put(StepPlan(step=1, archive=digest_of(b""), groups=(group,), scale=1.0))
    activities = SampleActivities(blobs, TaskSource(), (folder.parent,), pool)
    yield Room(search, write_style(tmp_path / "style", "qwen3-thinking"), policy, pool, activities, plan)
    server.shut_down()


async def test_a_rollout_in_two_phases_is_whole(room: Room) -> None:
    """Which seeds run into the limit is the model's affair; of eight, some do and none of them breaks the record."""
    records = [room.record(sampled) for sampled in await asyncio.gather(*(room.sample(r) for r in range(8)))]
    forced = [record for record in records if 0 in record.mask]
    assert len(forced) >= 2
    codec, limits = codec_for(room.search.folder), room.search.spec.request.sampling
    for record in records:
        size = len(record.response_tokens)
        assert len(record.log_probs) == len(record.mask) == size
        assert len(record.prompt_tokens) + size + RESERVE_TOKENS <= limits.context_tokens
        assert record.text == codec.decode(record.response_tokens)
        # The template's own, after the message; the ones in the parent's program and output are plain text.
        assert record.prompt_tokens.count(room.style.id_of("<|im_end|>")) == 1
        assert room.style.text(record.prompt_tokens).count("<|im_end|>") == 3
    for record in forced:
        first, last = record.mask.index(0), len(record.mask) - 1 - record.mask[::-1].index(0)
        assert len(record.prompt_tokens) + first == limits.thinking_tokens
        assert room.style.text(record.response_tokens[first : last + 1]) == f"\n\n{SPENT}\n</think>\n\n"
        assert set(record.mask[first : last + 1]) == {0} == {record.log_probs[i] for i in range(first, last + 1)}
        # Two line breaks follow the tag and belong to the answer; this model thinks again in some of its answers.
        again = {room.style.id_of("<think>"), room.style.id_of("</think>")} & set(record.response_tokens[last:])
        assert record.thinking_tokens == last - 1 or again
        assert all(p < 0 for p, m in zip(record.log_probs, record.mask, strict=True) if m)


async def test_the_trainer_finds_the_engines_log_probs_around_forced_tokens(room: Room) -> None:
    """The gap is that of float32 arithmetic: forced tokens shift nothing, and none of them is trained."""
    rows, sampled_tokens = [], 0
    for r in range(4):
        sampled = await room.sample(r)
        record = room.record(sampled)
        sampled_tokens += sum(record.mask)
        verdict = Verdict(at=record.at, outcome=Outcome.VALID, reason="", score=1.0 + r, value=1.0 + r, reward=1.0 + r)
        tokens = digest_of(canonical_json([record.prompt_tokens, record.response_tokens]))
        rows.append(
            BatchRow(
                at=record.at,
                rollout=sampled.rollout,
                verdict=room.search.store.put(verdict),
                outcome=verdict.outcome,
                reward=verdict.reward,
                value=verdict.value,
                score=verdict.score,
                exact=None,
                construction=None,
                tokens_digest=tokens,
            )
        )
    assert any(0 in room.search.store.load(RolloutRecord, row.rollout).mask for row in rows)
    batch = room.search.store.put(Batch(step=1, policy_version=0, plan=room.plan, rows=tuple(rows)))
    inputs = StepInputs(step=1, batch=batch, policy=room.policy)
    trained = train_step(room.search.store, room.search.spec, inputs, room.search.backend, resident=False, clock=time.monotonic)
    assert trained.metrics["tokens_trained"] == sampled_tokens
    assert trained.metrics["gap_engine_trainer_rms"] < 1e-4
    assert trained.metrics["ratio_max"] == pytest.approx(1.0, abs=1e-3)


async def test_a_rollout_is_paid_for_once_and_repeats_by_its_seeds(room: Room) -> None:
    first = await room.sample(0)
    requests = len(room.pool.timeouts)
    assert await room.sample(0) == first
    assert len(room.pool.timeouts) == requests
    store = room.search.store
    store.blobs.store.delete(store.rollout_key(Coordinate(step=1, group=0, rollout=0), "rollout"))
    again = await room.sample(0)
    assert len(room.pool.timeouts) > requests
    assert room.record(again).response_tokens == room.record(first).response_tokens


@pytest.mark.parametrize("seconds", [40.0, 4000.0])
async def test_requests_wait_as_long_as_this_attempt_may_take(room: Room, seconds: float) -> None:
    """The stored spec says 3600 s; an attempt that was scheduled with another time-out has that one."""
    assert room.search.spec.request.timeouts.sample_seconds == 3600
    before = len(room.pool.timeouts)
    await room.sample(1, seconds)
    asked = room.pool.timeouts[before:]
    assert asked
    assert all(0.5 * seconds < found <= 0.95 * seconds for found in asked)
    assert asked == sorted(asked, reverse=True)


async def test_settings_that_the_model_cannot_meet_end_the_attempt_for_good(room: Room) -> None:
    context = room.search.spec.request.sampling.context_tokens
    room.search = with_sampling(room.search, thinking_tokens=context - 20)
    before = len(room.pool.timeouts)
    with pytest.raises(ApplicationError, match=f"thinking_tokens={context - 20} leaves 20 of") as caught:
        await room.sample(0)
    assert (caught.value.type, caught.value.non_retryable) == ("InputError", True)
    assert len(room.pool.timeouts) == before  # the engine was asked nothing


async def test_an_engine_that_restarted_meanwhile_is_not_believed(room: Room) -> None:
    blobs = room.search.store.blobs
    notice = read_notice(blobs, "one")
    assert notice is not None

    class Restarting(LocalPool):
        def client(self, chosen: EngineNotice) -> AsyncEngineClient:
            write_notice(blobs, chosen.model_copy(update={"boot_id": "another"}))
            return room.pool._engine

    room.activities._pool = Restarting(blobs, None)
    with pytest.raises(ApplicationError, match="restarted while sampling") as caught:
        await room.sample(2)
    assert (caught.value.type, caught.value.non_retryable) == ("NotReady", False)
