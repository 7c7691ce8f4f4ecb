"""One rollout: prompt, engine, record. Plain Python; the activity around it knows Temporal."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable

from activities.engine_http import Sampling
from activities.errors import NotReady
from activities.records import Node, RolloutRecord, RunSpec, StepPlan
from activities.run_store import RunStore
from activities.sample.extract import FENCES, extract_program
from activities.sample.generating import Ask, generate_response
from activities.sample.pool import EnginePool
from activities.sample.prompt import ParentView, ProblemView
from activities.sample.thinking import TAGS
from activities.sample.tokens import PromptCodec
from tasks.registry import Task
from workflows.contracts.base import Coordinate, PolicyRef


def rollout_seed(run_seed: int, at: Coordinate, phase: int = 1) -> int:
    """A seed of its own for every coordinate and phase, 31 bits, the same on every host."""
    text = f"{run_seed}/{at.step}/{at.group}/{at.rollout}" + (f"/{phase}" if phase > 1 else "")
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:4]) >> 1


def views(spec: RunSpec, task: Task, parent: Node) -> tuple[ProblemView, ParentView]:
    """What the prompt may say: limits as the judge will enforce them, scores in the task's own unit."""
    offers = spec.offers_construction and parent.construction is not None and task.language == "python"
    problem = ProblemView(
        instruction=task.instruction,
        entry=task.entry,
        direction=task.direction,
        score_name=task.score_name,
        wall_seconds=spec.wall_seconds,
        cores=spec.cores,
        construction_name=task.construction_name if offers else None,
        language=task.language,
    )
    before = parent.ancestor_scores[0] if parent.ancestor_scores else None
    return problem, ParentView(code=parent.code, score=parent.score, previous_score=before, output_tail=parent.output_tail)


async def sample_rollout(
    spec: RunSpec,
    task: Task,
    codec: PromptCodec,
    pool: EnginePool,
    plan: StepPlan,
    at: Coordinate,
    policy: PolicyRef,
    seconds_left: Callable[[], float],
) -> RolloutRecord:
    """Sample one response and describe it completely.

    Args:
        seconds_left: until the attempt is given up. It bounds the requests, and not the run's stored time-out: one that was
            raised since the run began must have an effect.

    Raises:
        InputError: the model cannot meet the sampling settings, or the problem statement does not fit.
        NotReady: no verified engine, or it restarted during the request.
        EngineError: the engine failed, or its answer is inconsistent.
    """
    parent = plan.groups[at.group].parent
    sampling = spec.request.sampling
    problem, view = views(spec, task, parent)
    await asyncio.to_thread(codec.check, context_tokens=sampling.context_tokens, thinking_tokens=sampling.thinking_tokens)
    prompt = await asyncio.to_thread(
        codec.encode_fitting,
        problem,
        view,
        context_tokens=sampling.context_tokens,
        max_new_tokens=sampling.max_new_tokens,
        thinking_tokens=sampling.thinking_tokens,
    )
    ask = _ask(spec, at, policy, seconds_left)
    notice = await pool.acquire(spec.model_digest, policy, repeatable=ask.sampling.repeatable)
    try:
        response = await pool.ask(notice, generate_response(pool.client(notice), codec, prompt, ask))
    finally:
        pool.release(notice)
    if not await pool.same_boot(notice, policy):
        raise NotReady(f"{at}: engine {notice.engine} restarted while sampling; it is asked again once it has proved itself")
    text = codec.decode(response.tokens)
    return RolloutRecord(
        at=at,
        parent=parent.id,
        policy_version=policy.version,
        policy_name=policy.name,
        engine=notice.engine,
        boot_id=notice.boot_id,
        seed=rollout_seed(spec.request.seed, at),
        prompt_tokens=tuple(prompt.token_ids),
        prompt_shortened=prompt.shortened,
        response_tokens=response.tokens,
        log_probs=response.log_probs,
        mask=response.mask,
        thinking_tokens=codec.count_thinking(response.tokens),
        finish_reason=response.finish_reason,
        text=text,
        program=extract_program(text, FENCES[task.language], codec.style or TAGS),
    )


def _ask(spec: RunSpec, at: Coordinate, policy: PolicyRef, seconds_left: Callable[[], float]) -> Ask:
    sampling = spec.request.sampling
    return Ask(
        adapter=policy.name,
        sampling=Sampling(
            max_new_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k,
            seed=rollout_seed(spec.request.seed, at),
            repeatable=spec.request.decode == "repeatable",
        ),
        second_seed=rollout_seed(spec.request.seed, at, phase=2),
        max_new_tokens=sampling.max_new_tokens,
        context_tokens=sampling.context_tokens,
        two_phases=sampling.thinking_tokens is not None,
        seconds_left=seconds_left,
    )


def find_rollout(store: RunStore, at: Coordinate) -> tuple[str, RolloutRecord] | None:
    """The stored rollout of a coordinate: paid for once, never sampled again."""
    digest = store.find(store.rollout_key(at, "rollout"))
    return None if digest is None else (digest, store.load(RolloutRecord, digest))
