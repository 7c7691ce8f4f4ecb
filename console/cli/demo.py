"""`tttd demo`: one small run from start to end, with an explanation before and a summary after it."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING

import typer

from console.cli.run import NameOption, NewOption, SetOption, Wish, print_result, run_to_end
from console.output import command, emit, say

if TYPE_CHECKING:
    from console.cli.session import Session
    from console.launch import Asked
    from workflows.contracts.messages import StepSummary

TASK = "circle_packing_26"
PROFILE = "laptop"

_INTRODUCTION = """\
A demonstration on this machine: place 26 circles in the unit square so that the sum of their radii is as large as possible.

The model, {model}, is a toy: a few million parameters, trained on programs from a hand-written generator. It knows nothing but
programs of this kind. What is real is the machinery around it. In each of {steps} steps
  - {groups} parent programs are chosen from the archive, and the model writes {rollouts} new programs from each;
  - each program runs in a sandbox, and what it returns is judged in exact arithmetic: a score is a certificate;
  - the model is trained by one optimizer step on all {total} of them, and the new adapter is published and proved to be served.

Watch two numbers, which are not the same. `grid mean` is the mean reward of all {total} programs of a step, those that are not
valid counted as 0: it rises because the model learns. `best` is the best certified answer so far: it would also rise without any
learning, by trying often, so it proves nothing about training.
"""

_NEXT = (
    ("tttd best {run}", "the best program"),
    ("tttd status {run}", "the run in numbers (--json for all of them)"),
    ("tttd extend {run} --steps 4", "four more steps"),
    (f"tttd run {TASK} --set train=off", "the same search without training: what its mean is to be compared with"),
    ("tttd demo --set seed=1", "the same with other random numbers"),
    ("tttd down", "stop the services; runs stay"),
)


@command
def demo(settings: SetOption = None, name: NameOption = None, new: NewOption = False) -> int:
    """Run circle_packing_26 with a toy model on this machine, and explain what happens. Takes minutes."""
    from console.cli.session import open_session
    from console.launch import ask, build_raw

    session = open_session()
    asked = ask(build_raw(TASK, PROFILE, settings or [], name), session.settings)
    say(introduction(asked))
    return run_to_end(session, asked, Wish(new=new), present)


def introduction(asked: Asked) -> str:
    search = asked.request.search
    return _INTRODUCTION.format(
        model=asked.request.model,
        steps=search.steps,
        groups=search.groups,
        rollouts=search.rollouts,
        total=search.groups * search.rollouts,
    )


def present(session: Session, run_id: str, state: str, as_json: bool) -> int:
    """The result, what training did to the mean, and what to do next."""
    from console.stored import find_run, summaries

    code = print_result(session, run_id, state, as_json)
    stored = find_run(session.blobs, run_id)
    if stored is None or stored.head is None or not stored.step:
        return code
    found = summaries(session.blobs, run_id, range(1, stored.step + 1))
    for line in learning_lines(found, stored.head.policy.version):
        emit(line)
    settings = session.settings
    emit(f"  store  {session.blobs.store.url}")
    emit(f"  logs  {settings.logs.resolve()}")
    emit("next")
    commands = [(words.format(run=run_id), meaning) for words, meaning in _NEXT]
    width = max(len(words) for words, _ in commands)
    for words, meaning in commands:
        emit(f"  {words:<{width}}  {meaning}")
    return code


def learning_lines(found: Sequence[StepSummary], version: int) -> list[str]:
    """First and last mean reward. One step is a noisy measure, so the means of three steps at each end stand beside them."""
    if not found:
        return []
    means = [summary.mean_reward for summary in found]
    lines = [f"  grid mean  {means[0]:.4f} in the first step, {means[-1]:.4f} in the last"]
    if len(means) >= 6:
        lines[0] += f" (first three {fmean(means[:3]):.4f}, last three {fmean(means[-3:]):.4f})"
    lines.append(f"  policy  version {version}: {version} optimizer step{'' if version == 1 else 's'} from the model as it was")
    notes = [f"  note  step {s.step}: {note}" for s in found for note in s.notes]
    return lines + notes[-3:]


def register(app: typer.Typer) -> None:
    app.command()(demo)
