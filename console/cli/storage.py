"""`tttd storage gc | check | list`: what the store keeps, what it may lose, and whether all of it is intact."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from console.cli.control import RunArgument, run_name
from console.output import FAILED, OK, USAGE, Failure, command, emit, emit_json, say

if TYPE_CHECKING:
    from collections.abc import Callable

    from console.cli.session import Session
    from console.storage.checking import Checked
    from console.storage.collection import Collected

JsonOption = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


@command
def gc(
    run: Annotated[str | None, typer.Option("--run", help="Apply retention to this run only.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Apply it to every run, and delete what no run names.")] = False,
    keep_checkpoints: Annotated[
        int, typer.Option("--keep-checkpoints", min=1, help="Latest steps of each run that keep adapter and optimizer state.")
    ] = 3,
    grace_hours: Annotated[float, typer.Option("--grace-hours", min=0, help="Nothing younger is deleted.")] = 48.0,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be deleted; delete nothing.")] = False,
    as_json: JsonOption = False,
) -> int:
    """Delete what retention drops and what no run names. Safe while runs are going (docs/operate.md)."""
    import time
    from dataclasses import asdict

    from console.cli.session import open_session
    from console.storage.collection import Wish, collect

    if (run is None) == (not every):
        raise Failure("give either --run RUN or --all", USAGE)
    session = open_session()
    wish = Wish(None if run is None else (run,), keep_checkpoints, grace_hours * 3600, dry_run)
    collected = collect(session.blobs, wish, time.time(), _busy_runs(session))
    if as_json:
        emit_json(asdict(collected) | {"bytes": collected.bytes, "dry_run": dry_run})
    else:
        emit("\n".join(collected_lines(collected, dry_run=dry_run)))
    return OK


def _busy_runs(session: Session) -> Callable[[str], bool]:
    """Whether Temporal works on a run. If it cannot be asked, any run may be in progress."""
    from console.cli.session import connect, run_async
    from console.inquiry import NO_SUCH_RUN, look

    async def busy(run_id: str) -> bool:
        seen = await look(await connect(session.settings), run_id)
        return seen.is_running or seen.missing not in (None, NO_SUCH_RUN)

    def ask(run_id: str) -> bool:
        try:
            return run_async(busy(run_id))
        except Failure:
            return True

    return ask


def collected_lines(collected: Collected, *, dry_run: bool) -> list[str]:
    """What was deleted, for people."""
    lines = [
        f"{run}: adapter and optimizer state of {len(steps)} step{'' if len(steps) == 1 else 's'} "
        f"({', '.join(map(str, steps))}), {sum(steps.values())} blobs"
        for run, steps in collected.retired.items()
    ]
    if collected.orphans:
        lines.append(f"{collected.orphans} blobs that no run names, {size_text(collected.orphan_bytes)}")
    if collected.unfinished:
        lines.append(f"{collected.unfinished} unfinished files of killed writers, {size_text(collected.unfinished_bytes)}")
    if collected.spared:
        lines.append(f"{collected.spared} more blobs are not needed, but young or of a step in progress: kept for now")
    return [*lines, f"{'would free' if dry_run else 'freed'} {size_text(collected.bytes)}"]


def size_text(size: int) -> str:
    """Bytes for people: `1.2 MB`."""
    value, unit = float(size), "B"
    for bigger in ("kB", "MB", "GB", "TB"):
        if value < 1000:
            break
        value, unit = value / 1000, bigger
    return f"{size} B" if unit == "B" else f"{value:.1f} {unit}"


@command
def check(
    run: Annotated[str | None, typer.Argument(metavar="[RUN]", callback=run_name, help="Run id; without one, all runs.")] = None,
    bundle: Annotated[
        Path | None, typer.Option("--from", metavar="BUNDLE", help="Mend damaged and missing blobs from this bundle.")
    ] = None,
    as_json: JsonOption = False,
) -> int:
    """Read every blob of a run, compare it with its digest, and replay the chain. Exit code 1: something is wrong."""
    from dataclasses import asdict

    from console.cli.session import open_session
    from console.stored import run_ids

    session = open_session()
    found = [_check_one(session, run_id, bundle) for run_id in ([run] if run else run_ids(session.blobs))]
    if as_json:
        emit_json([asdict(checked) for checked in found])
    else:
        emit("\n".join(line for checked in found for line in checked_lines(checked)) or "no runs yet")
    return FAILED if any(checked.problems for checked in found) else OK


def _check_one(session: Session, run_id: str, bundle: Path | None) -> Checked:
    from activities.blobs import Blobs, MissingKey
    from console.storage.bundle import BundleStore
    from console.storage.checking import check_run
    from console.stored import find_run, task_of, unknown_run

    if not session.blobs.store.folders(f"runs/{run_id}/") and find_run(session.blobs, run_id) is None:
        raise Failure(unknown_run(session.blobs, run_id))
    store = None if bundle is None else BundleStore(bundle)

    def spare(digest: str) -> bytes | None:
        try:
            return None if store is None else store.get(Blobs.key(digest))
        except MissingKey:
            return None

    try:
        return check_run(session.blobs, run_id, lambda spec: task_of(spec, session.tasks), spare)
    finally:
        if store is not None:
            store.close()


def checked_lines(checked: Checked) -> list[str]:
    """What was found, for people."""
    lines = [f"{checked.run_id}: mended blob {digest}" for digest in checked.repaired]
    for problem in checked.problems:
        named = f"; named by {', '.join(problem.named_by)}" if problem.named_by else ""
        lines.append(f"{checked.run_id}: {problem.where}: {problem.what}{named}")
    dropped = f"; {checked.absent} dropped on purpose" if checked.absent else ""
    verdict = f"{len(checked.problems)} problems" if checked.problems else "intact"
    last = "nothing committed" if checked.last_step is None else f"step {checked.last_step}"
    lines.append(
        f"{checked.run_id}: {verdict}: {checked.entries} entries, {checked.blobs} blobs, {size_text(checked.bytes)}{dropped}; "
        f"{last}, {checked.replayed} of {checked.steps} commits made again with the same digests"
    )
    return lines


@command
def list_steps(run: RunArgument) -> int:
    """List the steps of a run that it, or a fork, can go on from."""
    from activities.errors import InputError
    from activities.open.whole import check_whole
    from activities.run_store import RunStore
    from console.cli.session import open_session
    from console.storage.retention import kept_steps, read_history
    from console.stored import find_run, unknown_run

    session = open_session()
    if find_run(session.blobs, run) is None:
        raise Failure(unknown_run(session.blobs, run))
    store = RunStore(session.blobs, run)
    history = read_history(store)
    kept = kept_steps(store, history.commits, 1)
    for commit, digest in zip(history.commits, history.digests, strict=True):
        why = {"best": "a new best", "first": "the first", "latest": "the latest"}.get(kept.get(commit.step, ""), "")
        try:
            check_whole(store, commit)
            state = "whole"
        except InputError:
            state = "retired"
        emit(f"{commit.step:>6}  {digest[:12]}  {state:<8}  version {commit.policy.version}{f'  {why}' if why else ''}")
    say(f"`tttd fork {run} --at-step N` begins a new run after a whole step")
    return OK


def register(app: typer.Typer) -> None:
    group = typer.Typer(no_args_is_help=True, help="Keep the store small and intact.")
    group.command()(gc)
    group.command()(check)
    group.command("list")(list_steps)
    app.add_typer(group, name="storage")
