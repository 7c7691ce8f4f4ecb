"""Policies on a fixed set of parents: the same prompts, the real engine, the real judge. Knows no archive and no training."""

from __future__ import annotations

import asyncio
import contextlib
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from activities.blobs import Blobs, digest_of
from activities.engine_http import AsyncEngineClient, Sampling
from activities.judge.judging import Case, Judgement, judge, limits_of_task
from activities.judge.sandbox import Sandbox, open_sandbox
from activities.models import find_model
from activities.publish.placing import materialise
from activities.records import canonical_json
from activities.run_store import RunStore
from activities.sample.extract import extract_program
from activities.sample.prompt import ParentView, ProblemView, render_prompt
from activities.sample.tokens import PromptCodec, codec_for
from scripts.proposer.corpus import make_parents
from tasks.registry import load_task
from workers.engine.process import EngineProcess, embedded_command, start_engine
from workers.ports import free_port
from workers.settings import Settings
from workflows.contracts.base import Outcome, PolicyRef

HELD_OUT_SEED = 1_000_003
"""Of the generator; pre-training draws its parents from another."""
WALL_SECONDS = 10.0
MAX_NEW_TOKENS = 256


@dataclass(frozen=True)
class PolicyResult:
    """One policy on all fixed parents."""

    samples: int
    mean_reward: float
    standard_error: float
    """Of the mean reward, over parents."""
    valid: int
    valid_and_new: int
    """Distinct certified constructions that are none of the parents' own."""
    improved: int
    """Better than their own parent."""
    best: float


@dataclass(frozen=True)
class _Parent:
    code: str
    score: float
    construction: str


class FixedParents:
    """Use as an async context: owns an engine process and a sandbox while open."""

    def __init__(self, blobs: Blobs, home: Path, parents: int, samples: int) -> None:
        self._blobs = blobs
        self._home = home.resolve()
        self._count = parents
        self._samples = samples
        self._task = load_task("circle_packing_26")
        self._parents: list[_Parent] = []

    async def __aenter__(self) -> FixedParents:
        settings = Settings(home=self._home)
        model = find_model("packing", settings.model_directories)
        self._codec: PromptCodec = codec_for(model)
        port = free_port("127.0.0.1")
        url = f"http://127.0.0.1:{port}"
        self._engine: EngineProcess = start_engine(embedded_command(settings, model, port), url, self._home / "logs" / "fixed.log")
        await self._engine.ready()
        self._client = AsyncEngineClient(url)
        self._sandbox: Sandbox = await asyncio.to_thread(open_sandbox)
        # A quarter of the generator's programs is invalid by intent; draw enough and keep the first that the judge certifies.
        for candidate in await asyncio.to_thread(make_parents, HELD_OUT_SEED, 2 * self._count):
            judged = await self._judge(candidate.code)
            if judged.outcome is Outcome.VALID and len(self._parents) < self._count:
                self._parents.append(_Parent(candidate.code, _score(judged), _construction(judged)))
        assert len(self._parents) == self._count, f"only {len(self._parents)} of {self._count} fixed parents are valid"
        return self

    async def __aexit__(self, *_: Any) -> None:
        await self._client.close()
        self._engine.stop()
        await self._sandbox.close()

    async def measure(self, store: RunStore, policy: PolicyRef, seed: int) -> PolicyResult:
        """Sample every parent and judge the answers.

        Args:
            seed: of the sampling; one per run, the same for its first and last policy.
        """
        directory = materialise(self._blobs, policy.adapter, self._home / "adapters" / "fixed", policy.name)
        if policy.name not in await self._client.loaded_adapters():
            await self._client.load_adapter(policy.name, str(directory))
        coordinates = [(p, s) for p in range(self._count) for s in range(self._samples)]
        programs = await asyncio.gather(*(self._sample(policy, p, seed * 1_000_000 + p * 1000 + s) for p, s in coordinates))
        judgements = [await self._judge(program) for program in programs]
        with contextlib.suppress(Exception):
            await self._client.unload_adapter(policy.name)
        return self._summary([(self._parents[p], j) for (p, _), j in zip(coordinates, judgements, strict=True)])

    async def _sample(self, policy: PolicyRef, parent: int, seed: int) -> str | None:
        chosen = self._parents[parent]
        prompt = render_prompt(self._problem(), ParentView(chosen.code, chosen.score, None))
        asked = Sampling(max_new_tokens=MAX_NEW_TOKENS, seed=seed, stop_token_ids=tuple(self._codec.stop_token_ids))
        (generation,) = await self._client.generate([self._codec.encode(prompt)], asked, adapter=policy.name)
        return extract_program(self._codec.decode(generation.tokens))

    def _problem(self) -> ProblemView:
        task = self._task
        return ProblemView(task.instruction, task.entry, task.direction, task.score_name, WALL_SECONDS, task.limits.cores)

    async def _judge(self, program: str | None) -> Judgement:
        limits = limits_of_task(self._task, WALL_SECONDS)
        return await judge(self._task, self._task.make_judge(), Case(program), limits, self._sandbox)

    def _summary(self, pairs: list[tuple[_Parent, Judgement]]) -> PolicyResult:
        valid = [(parent, j) for parent, j in pairs if j.outcome is Outcome.VALID]
        known = {parent.construction for parent in self._parents}
        by_parent = [[j.reward for parent, j in pairs if parent is p] for p in self._parents]
        means = [statistics.fmean(rewards) for rewards in by_parent]
        return PolicyResult(
            samples=len(pairs),
            mean_reward=statistics.fmean(means),
            standard_error=statistics.stdev(means) / len(means) ** 0.5,
            valid=len(valid),
            valid_and_new=len({_construction(j) for _, j in valid} - known),
            improved=sum(_score(j) > parent.score for parent, j in valid),
            best=max((_score(j) for _, j in valid), default=0.0),
        )


def _score(judgement: Judgement) -> float:
    assert judgement.grade is not None
    assert judgement.grade.score is not None
    return judgement.grade.score


def _construction(judgement: Judgement) -> str:
    assert judgement.grade is not None
    return digest_of(canonical_json(judgement.grade.construction))
