"""Turns generated programs into training pairs: the run's own prompt, then the child program.

Uses the prompt renderer of the sampler and the task's own statement, never copies: the model is conditioned on their exact
words, so a change of either wording asks for a new pre-training. Knows no tensors.
"""

from __future__ import annotations

import random
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from activities.sample.prompt import ParentView, ProblemView, render_prompt
from scripts.proposer.execute import Outcome, run_programs
from scripts.proposer.generate import Spec, child_spec, parent_spec, render

TASK = Path(__file__).parents[2] / "tasks" / "circle_packing_26"
WALL_SECONDS = (5, 10, 20, 30, 60, 480)
EMPTY_SHARE = 0.05
UNSCORED_SHARE = 0.01
CONSTRUCTION_SHARE = 0.5
"""Of prompts that offer the parent's construction as a global; the programs do not use it."""


@dataclass(frozen=True)
class Parent:
    """A valid program with what a prompt shows of it."""

    spec: Spec
    code: str
    outcome: Outcome


@dataclass(frozen=True)
class Pair:
    """One training text, before the chat template."""

    prompt: str
    response: str


def problem_view(wall_seconds: float = 10.0, cores: int = 1, offers_construction: bool = False) -> ProblemView:
    """The task as the prompt renderer wants it, read from the task's folder."""
    discovery = tomllib.loads((TASK / "task.toml").read_text(encoding="utf-8"))["metadata"]["discovery"]
    return ProblemView(
        instruction=(TASK / "instruction.md").read_text(encoding="utf-8").strip(),
        entry=discovery["entry"],
        direction=discovery["direction"],
        score_name=discovery["score_name"],
        wall_seconds=wall_seconds,
        cores=cores,
        construction_name=discovery["construction_name"] if offers_construction else None,
    )


def seed_program() -> str:
    return (TASK / "seeds" / "grid.py").read_text(encoding="utf-8")


def make_parents(seed: int, count: int, workers: int = 2) -> list[Parent]:
    """Draw `count` specs, run them and keep the valid ones, as an archive would."""
    rng = random.Random(f"parents {seed}")
    specs = [parent_spec(rng) for _ in range(count)]
    codes = [render(spec) for spec in specs]
    outcomes = run_programs(codes, workers)
    return [Parent(s, c, o) for s, c, o in zip(specs, codes, outcomes, strict=True) if o.score is not None]


def parent_prompt(rng: random.Random, parent: Parent | None, parents: Sequence[Parent], problem: ProblemView) -> str:
    """The prompt over one parent. The value before it is that of any other parent: it says nothing of the child."""
    if parent is None:
        return render_prompt(problem, ParentView("", None, None))
    score = None if rng.random() < UNSCORED_SHARE else parent.outcome.score
    previous = rng.choice(parents).outcome.score if rng.random() < 0.6 else None
    return render_prompt(problem, ParentView(parent.code, score, previous, parent.outcome.output))


def make_pairs(seed: int, parents: Sequence[Parent], count: int) -> list[Pair]:
    """Training pairs; children are not run."""
    rng = random.Random(f"pairs {seed}")
    problems = {(w, c, o): problem_view(w, c, o) for w in WALL_SECONDS for c in (1, 2) for o in (False, True)}
    pairs = []
    for _ in range(count):
        parent = None if rng.random() < EMPTY_SHARE else rng.choice(parents)
        cores = 2 if rng.random() < 0.15 else 1
        problem = problems[rng.choice(WALL_SECONDS), cores, rng.random() < CONSTRUCTION_SHARE]
        prompt = parent_prompt(rng, parent, parents, problem)
        pairs.append(Pair(prompt, fence(render(child_spec(rng, parent.spec if parent else None)))))
    return pairs


def fence(code: str) -> str:
    """The whole response: one fenced block, as the prompt asks."""
    return f"```python\n{code.strip()}\n```"


def held_out_prompts(count: int, seed: int = 1_000_003, workers: int = 2) -> tuple[list[str], list[str]]:
    """Prompts over fixed parents that pre-training does not draw, and those parents' programs."""
    parents = make_parents(seed, count + count // 3 + 8, workers)[:count]
    rng = random.Random(f"held out {seed}")
    problem = problem_view()
    return [parent_prompt(rng, p, parents, problem) for p in parents], [p.code for p in parents]


def seed_prompts(count: int) -> tuple[list[str], list[str]]:
    """The same prompt `count` times: the task's default start, at step 0 of a run."""
    code = seed_program()
    outcome = run_programs([code], 1)[0]
    prompt = render_prompt(problem_view(), ParentView(code, outcome.score, None))
    return [prompt] * count, [code] * count
