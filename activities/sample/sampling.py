"""One rollout: prompt, engine, record. Plain Python; the activity around it knows Temporal."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
from collections import Counter
from collections.abc import Callable

from activities.blobs import Blobs
from activities.engine_http import AsyncEngineClient, Generation, Sampling
from activities.errors import EngineError, NotReady
from activities.fleet import live_engines, read_notice
from activities.records import EngineNotice, Node, RolloutRecord, RunSpec, RunStore, StepPlan
from activities.sample.extract import extract_program
from activities.sample.prompt import ParentView, ProblemView
from activities.sample.tokens import EncodedPrompt, PromptCodec
from tasks.registry import Task
from workflows.contracts.base import Coordinate, PolicyRef

WAIT_SECONDS = 30.0
"""How long one attempt waits for a verified engine before it lets Temporal count another attempt."""


def rollout_seed(run_seed: int, at: Coordinate) -> int:
    """A seed of its own for every coordinate, 31 bits, the same on every host."""
    text = f"{run_seed}/{at.step}/{at.group}/{at.rollout}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) >> 1


def views(spec: RunSpec, task: Task, parent: Node) -> tuple[ProblemView, ParentView]:
    """What the prompt may say: limits as the judge will enforce them, scores in the task's own unit."""
    offers = spec.request.search.offer_construction and parent.construction is not None
    problem = ProblemView(
        instruction=task.instruction,
        entry=task.entry,
        direction=task.direction,
        score_name=task.score_name,
        wall_seconds=spec.wall_seconds,
        cores=spec.cores,
        construction_name=task.construction_name if offers else None,
    )
    before = parent.ancestor_scores[0] if parent.ancestor_scores else None
    return problem, ParentView(code=parent.code, score=parent.score, previous_score=before, output_tail=parent.output_tail)


class EnginePool:
    """Chooses an engine for each rollout: verified for the policy, the least loaded by this worker's own count."""

    def __init__(self, blobs: Blobs, clock: Callable[[], float]) -> None:
        self._blobs = blobs
        self._clock = clock
        self._running: Counter[str] = Counter()
        self._clients: dict[str, AsyncEngineClient] = {}
        self._turn = itertools.count()

    async def acquire(self, model_digest: str, policy: PolicyRef) -> EngineNotice:
        """Wait for an engine whose present boot has passed the gate for this policy.

        Raises:
            NotReady: none within 30 s; says how many engines there are and what they lack.
        """
        deadline = self._clock() + WAIT_SECONDS
        while True:
            engines = await asyncio.to_thread(live_engines, self._blobs, model_digest, self._clock())
            ready = [e for e in engines if policy.name in e.verified]
            if ready:
                turn = next(self._turn)
                chosen = min(enumerate(ready), key=lambda ie: (self._running[ie[1].engine], (ie[0] + turn) % len(ready)))[1]
                self._running[chosen.engine] += 1
                return chosen
            if self._clock() > deadline:
                raise NotReady(
                    f"no engine has proved that it serves {policy.name}: {len(engines)} engines are up for model "
                    f"{model_digest[:12]}; see `tttd status`, and start one with `tttd worker engine` if there is none"
                )
            await asyncio.sleep(0.5)

    def release(self, notice: EngineNotice) -> None:
        self._running[notice.engine] -= 1

    def client(self, notice: EngineNotice) -> AsyncEngineClient:
        if notice.url not in self._clients:
            self._clients[notice.url] = AsyncEngineClient(notice.url)
        return self._clients[notice.url]

    async def same_boot(self, notice: EngineNotice, policy: PolicyRef) -> bool:
        """Whether the engine is still the process that passed the gate: a restart in between could have served anything."""
        now = await asyncio.to_thread(read_notice, self._blobs, notice.engine)
        return now is not None and now.boot_id == notice.boot_id and policy.name in now.verified


async def sample_rollout(
    spec: RunSpec,
    task: Task,
    codec: PromptCodec,
    pool: EnginePool,
    plan: StepPlan,
    at: Coordinate,
    policy: PolicyRef,
) -> RolloutRecord:
    """Sample one response and describe it completely.

    Raises:
        NotReady: no verified engine, or it restarted during the request.
        EngineError: the engine failed, or its answer is inconsistent.
    """
    parent = plan.groups[at.group].parent
    sampling = spec.request.sampling
    problem, view = views(spec, task, parent)
    prompt = await asyncio.to_thread(
        codec.encode_fitting, problem, view, context_tokens=sampling.context_tokens, max_new_tokens=sampling.max_new_tokens
    )
    seed = rollout_seed(spec.request.seed, at)
    notice = await pool.acquire(spec.model_digest, policy)
    try:
        generation = await _generate(pool.client(notice), spec, codec, prompt, policy, seed)
    finally:
        pool.release(notice)
    if not await pool.same_boot(notice, policy):
        raise NotReady(f"{at}: engine {notice.engine} restarted while sampling; it is asked again once it has proved itself")
    text = codec.decode(generation.tokens)
    return RolloutRecord(
        at=at,
        parent=parent.id,
        policy_version=policy.version,
        policy_name=policy.name,
        engine=notice.engine,
        boot_id=notice.boot_id,
        seed=seed,
        prompt_tokens=tuple(prompt.token_ids),
        prompt_shortened=prompt.shortened,
        response_tokens=generation.tokens,
        log_probs=generation.log_probs,
        mask=(1,) * len(generation.tokens),
        finish_reason=generation.finish_reason,
        text=text,
        program=extract_program(text, task.language),
    )


async def _generate(
    client: AsyncEngineClient, spec: RunSpec, codec: PromptCodec, prompt: EncodedPrompt, policy: PolicyRef, seed: int
) -> Generation:
    sampling = spec.request.sampling
    asked = Sampling(
        max_new_tokens=prompt.max_new_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=seed,
        stop_token_ids=tuple(codec.stop_token_ids),
        repeatable=spec.request.decode == "repeatable",
    )
    (generation,) = await client.generate(
        [prompt.token_ids], asked, adapter=policy.name, timeout_seconds=spec.request.timeouts.sample_seconds
    )
    if len(generation.tokens) > prompt.max_new_tokens:
        raise EngineError(
            f"engine {client.url}: {len(generation.tokens)} tokens for at most {prompt.max_new_tokens} asked; "
            "its answer cannot be trained on"
        )
    return generation


def find_rollout(store: RunStore, at: Coordinate) -> tuple[str, RolloutRecord] | None:
    """The stored rollout of a coordinate: paid for once, never sampled again."""
    digest = store.find(store.rollout_key(at, "rollout"))
    return None if digest is None else (digest, store.load(RolloutRecord, digest))
