"""The prompt of one rollout. Source: spec algorithm 3.1.

Everything the text promises is taken from the task and the run's limits, so it cannot say two cores where there is one.
"""

from __future__ import annotations

from dataclasses import dataclass

from activities.sample.extract import FENCES
from activities.sample.thinking import CHANNELS, TAGS

OUTPUT_TAIL_CHARACTERS = 500
"""Of the parent's printed output; the end is what matters, since programs print their best last."""

TEMPLATE_VERSION = "1"
"""Part of the run's identity through :func:`template_digest_source`; raise it with any change of wording."""

_DIRECTION = {
    "maximize": "A higher score is better.",
    "minimize": "A lower score is better.",
}


@dataclass(frozen=True)
class ParentView:
    """What a prompt may show of a parent."""

    code: str
    score: float | None
    """Certified score in the task's unit; None for a start that has none. With a score but no code, the parent is a construction
    that the search begins from."""
    previous_score: float | None
    """Score of the parent's own parent; None for a seed."""
    output_tail: str = ""
    withheld: bool = False
    """There is a program, but none of it fits: `code` is empty, and the prompt must not say that this is the first one."""


@dataclass(frozen=True)
class ProblemView:
    """What a prompt says of the problem, its limits and its direction."""

    instruction: str
    entry: str
    direction: str
    score_name: str
    wall_seconds: float
    cores: int
    construction_name: str | None = None
    """Name of the global that holds the parent's construction, if the run offers one."""
    language: str = "python"
    """Of programs, as tasks name it."""


def render_prompt(problem: ProblemView, parent: ParentView) -> str:
    """The user message. One message, no system message."""
    blocks = [problem.instruction.strip(), _limits(problem)]
    fence = FENCES[problem.language]
    if parent.code:
        blocks += ["## Parent program", _fence(parent.code, fence), _progress(problem, parent)]
        if parent.output_tail:
            blocks += ["The end of its output:", _fence(_tail(parent.output_tail), "text")]
        blocks += _construction(problem)
        blocks.append(
            "Think about why it stops there, then write a program that scores better. Changing the method is worth more than\n"
            "changing a constant; only a real improvement counts."
        )
    elif parent.withheld:
        blocks.append(f"The parent program is too long to be shown.\n{_progress(problem, parent)}")
        blocks += _construction(problem)
    else:
        blocks.append("There is no program yet. Write the first one.")
        blocks += _first_answer(problem, parent)
    blocks.append(f"Answer with the complete program, defining `{problem.entry}()`, in one ```{fence} block.")
    return "\n\n".join(blocks)


def _limits(problem: ProblemView) -> str:
    cores = "1 CPU core" if problem.cores == 1 else f"{problem.cores} CPU cores"
    return f"Time limit: {problem.wall_seconds:g} seconds on {cores}.\n{_DIRECTION[problem.direction]}"


def _progress(problem: ProblemView, parent: ParentView) -> str:
    if parent.score is None:
        return f"It has no {problem.score_name} yet."
    before = "" if parent.previous_score is None else f"{parent.previous_score:.8f} -> "
    return f"Its {problem.score_name}: {before}{parent.score:.8f}"


def _construction(problem: ProblemView) -> list[str]:
    name = problem.construction_name
    return [f"Its answer is given to your program as the global `{name}`."] if name else []


def _first_answer(problem: ProblemView, parent: ParentView) -> list[str]:
    """A root that has a construction but no program: what it is worth, and where the program finds it."""
    if parent.score is None:
        return []
    name = problem.construction_name
    given = f" It is given to your program as the global `{name}`." if name else ""
    return [
        f"The search begins from an answer that no program made.{given}\n{_progress(problem, parent)}",
        "Your program must find a better one; only a real improvement counts.",
    ]


def _fence(text: str, language: str) -> str:
    return f"```{language}\n{text.strip()}\n```"


def _tail(output: str) -> str:
    return output if len(output) <= OUTPUT_TAIL_CHARACTERS else "[...] " + output[-OUTPUT_TAIL_CHARACTERS:]


def template_digest_source() -> str:
    """Text whose digest enters the run's identity: the wording of every branch, rendered with fixed values, and what is forced
    into a response whose thinking is cut."""
    problem = ProblemView("INSTRUCTION", "ENTRY", "maximize", "SCORE", 10.0, 1, "CONSTRUCTION")
    minimise = ProblemView("INSTRUCTION", "ENTRY", "minimize", "SCORE", 10.0, 2)
    cases = [
        render_prompt(problem, ParentView("CODE", 1.0, 0.5, "OUT")),
        render_prompt(minimise, ParentView("CODE", None, None)),
        render_prompt(minimise, ParentView("", None, None)),
        render_prompt(problem, ParentView("", 1.0, 0.5, withheld=True)),
        render_prompt(problem, ParentView("", 1.0, None)),
        render_prompt(minimise, ParentView("", 1.0, None)),
        *(style.closing(begun) for style in (TAGS, CHANNELS) for begun in style.unfinished),
    ]
    return "\0".join([TEMPLATE_VERSION, *cases])
