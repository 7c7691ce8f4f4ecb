"""Does it learn? The same budget with training, without, and as best-of-N; then first and last policy on the same parents.

A better archive gives better parents, and better parents better children: curves alone cannot tell a better policy from that. So
version 0 and the last version answer the run's seed prompt again, as often as each other, outside of any run.
"""

from __future__ import annotations

import asyncio
import contextlib
import statistics
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from activities.engine_http import AsyncEngineClient, Sampling
from activities.judge.judging import Case, Judgement, judge, limits_of
from activities.judge.sandbox import Sandbox, SandboxSettings, open_sandbox
from activities.judge.slots import Slots
from activities.models import find_model
from activities.publish.placing import materialise
from activities.records import ArchiveState, Node, RunSpec
from activities.run_store import RunStore
from activities.sample.extract import extract_program
from activities.sample.sampling import views
from activities.sample.thinking import TAGS
from activities.sample.tokens import PromptCodec, codec_for
from scripts.gpu.doctor_and_gate import commit_of, first_engine, last_commit
from scripts.gpu.lab import Lab
from scripts.gpu.programs import describe, read_answers
from tasks.registry import Task, load_task
from workflows.contracts.base import Outcome, PolicyRef

ARMS = {"train": (), "no-train": ("train=off",), "best-of-n": ("train=off", "search.strategy=best_of_n")}
"""Settings of each arm; all have one seed, grid and number of steps."""
_CURVE = (
    "judge/valid_fraction", "judge/valid_and_new_fraction", "judge/improved_fraction", "reward/mean", "search/best_score",
    "train/kl_policy_base", "train/gap_engine_trainer_mean", "train/gap_engine_trainer_rms", "sample/entropy",
)  # fmt: skip
_AT_ONCE = 512


def experiment(lab: Lab) -> None:
    """Run the arms, then the fixed parents."""
    lab.up()
    arms = lab.wish.arms or tuple(ARMS)
    curves: dict[str, Any] = {}
    with ThreadPoolExecutor(len(arms) if lab.wish.together else 1) as pool:
        for arm, run in zip(arms, pool.map(lambda arm: lab.run(f"learning-{arm}", *ARMS[arm]), arms), strict=True):
            curves[arm] = [_point(line) for line in lab.metrics(run.run_id)]
            lab.keep("curves", curves)
    lab.keep("programs", {arm: programs(lab, RunStore(lab.blobs, f"learning-{arm}")) for arm in arms})
    lab.keep("fixed_parents", asyncio.run(fixed_parents(lab, RunStore(lab.blobs, "learning-train"))))
    lab.down()


def _point(line: dict[str, Any]) -> dict[str, Any]:
    seconds = {name: value for name, value in line.items() if name.endswith("_seconds") or name.startswith("time/")}
    return {"step": line["step"], **{name: line.get(name) for name in _CURVE}, **seconds}


def programs(lab: Lab, run: RunStore) -> list[dict[str, Any]]:
    """What a run's answers were, step by step, beside its seed."""
    seed = seed_of(run)
    return describe(read_answers(run), seed.code, seed.score, load_task(lab.wish.task).sign)


def seed_of(run: RunStore) -> Node:
    """The first state of a run's archive, which all of its arms and the fixed parents' prompt begin from."""
    return run.load(ArchiveState, commit_of(run, 0).archive).nodes[0]


async def fixed_parents(lab: Lab, run: RunStore) -> dict[str, Any]:
    """The seed program's prompt under the first and the last policy, `samples` responses each, judged as in the run."""
    spec, task = lab.spec(run), load_task(lab.wish.task)
    codec = codec_for(find_model(lab.wish.model, lab.settings.model_directories), spec.request.sampling.thinking)
    first, last = commit_of(run, 0), last_commit(run)
    parent = seed_of(run)
    prompt = codec.encode_fitting(
        *views(spec, task, parent),
        context_tokens=spec.request.sampling.context_tokens,
        max_new_tokens=spec.request.sampling.max_new_tokens,
        thinking_tokens=None,
    )
    found: dict[str, Any] = {"parent_score": parent.score, "samples": lab.wish.samples, "prompt_tokens": len(prompt.token_ids)}
    slots = Slots(lab.settings.judge_slots)
    sandbox = await asyncio.to_thread(open_sandbox, SandboxSettings(uid_base=lab.settings.judge_uid_base + 500))
    try:
        for label, policy in (("first", first.policy), ("last", last.policy)):
            programs = await _answers(lab, run, policy, spec, codec, task, prompt.token_ids, prompt.max_new_tokens)
            gate = asyncio.Semaphore(max(1, slots.cores // spec.cores))
            judged = await asyncio.gather(*(_judge(task, spec, program, sandbox, gate) for program in programs))
            found[label] = {"version": policy.version, **_summary(judged, parent.score, task.sign)}
    finally:
        await sandbox.close()
    return found


async def _answers(
    lab: Lab, run: RunStore, policy: PolicyRef, spec: RunSpec, codec: PromptCodec, task: Task, prompt: list[int], new_tokens: int
) -> list[str | None]:
    notice = first_engine(lab)
    client = AsyncEngineClient(notice.url, connections=_AT_ONCE)
    try:
        if policy.name not in await client.loaded_adapters():
            folder = lab.settings.home.resolve() / "adapters" / "fixed"
            await client.load_adapter(policy.name, str(materialise(run.blobs, policy.adapter, folder, policy.name)))
        room = asyncio.Semaphore(_AT_ONCE)

        async def answer(number: int) -> str | None:
            sampling = Sampling(max_new_tokens=new_tokens, seed=number, stop_token_ids=tuple(codec.stop_token_ids))
            async with room:
                (generation,) = await client.generate([prompt], sampling, adapter=policy.name)
            return extract_program(codec.decode(generation.tokens), task.language, codec.style or TAGS)

        return list(await asyncio.gather(*(answer(i) for i in range(lab.wish.samples))))
    finally:
        with contextlib.suppress(Exception):
            await client.close()


async def _judge(task: Task, spec: RunSpec, program: str | None, sandbox: Sandbox, gate: asyncio.Semaphore) -> Judgement:
    async with gate:
        return await judge(task, task.make_judge(), Case(program, spec.request.seed), limits_of(spec), sandbox)


def _summary(judged: list[Judgement], parent: float | None, sign: int) -> dict[str, Any]:
    scores = [j.grade.score for j in judged if j.outcome is Outcome.VALID and j.grade is not None and j.grade.score is not None]
    rewards = [j.reward for j in judged]
    return {
        "valid": len(scores),
        "improved_over_parent": sum(parent is None or sign * (score - parent) > 0 for score in scores),
        "mean_reward": statistics.fmean(rewards),
        "standard_error": statistics.stdev(rewards) / len(rewards) ** 0.5 if len(rewards) > 1 else None,
        "best": max(scores, key=lambda score: sign * score, default=None),
        "outcomes": {str(o): sum(j.outcome is o for j in judged) for o in sorted({j.outcome for j in judged})},
    }
