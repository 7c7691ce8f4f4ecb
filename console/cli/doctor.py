"""`tttd doctor`: whether this machine can run, check by check."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from console.output import FAILED, OK, Failure, command, emit, emit_json

if TYPE_CHECKING:
    from console.doctor import Check
    from workers.settings import Settings

_MARKS = {"ok": "ok     ", "warning": "warning", "failed": "FAILED "}


@command
def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print the checks as JSON.")] = False) -> int:
    """Check everything that a local run needs, and say what to do. Exit code 1 if something needed is missing."""
    from console.cli.session import has_foreign_temporal, quiet_logs, run_async
    from console.doctor import local_checks
    from workers.settings import load_settings

    settings = load_settings()
    quiet_logs(settings)
    foreign = has_foreign_temporal(settings)
    checks: list[Check] = []
    for check in local_checks(settings):
        # With a server of one's own the CLI is a convenience.
        needed = not (foreign and check.name == "temporal")
        checks.append(check if needed or check.verdict != "failed" else check.model_copy(update={"verdict": "warning"}))
        _show(checks[-1], as_json)
    run_async(_running(settings, not foreign, checks, as_json))
    failed = [check.name for check in checks if check.verdict == "failed"]
    if as_json:
        emit_json({"ok": not failed, "checks": [check.model_dump(mode="json") for check in checks]})
    else:
        emit(f"missing for a local run: {', '.join(failed)}" if failed else "everything that a local run needs is here")
    return FAILED if failed else OK


async def _running(settings: Settings, is_ours: bool, checks: list[Check], as_json: bool) -> None:
    from console.cli.session import connect
    from console.doctor_services import check_server, running_checks
    from workers.connect import connect_blobs, connect_options

    address = connect_options(settings)["target_host"]
    try:
        client = await connect(settings)
    except Failure as error:
        checks.append(check_server(str(error), address, is_ours))
        _show(checks[-1], as_json)
        return
    checks.append(check_server(None, address, is_ours))
    _show(checks[-1], as_json)
    async for check in running_checks(client, connect_blobs(settings), is_ours):
        checks.append(check)
        _show(check, as_json)


def _show(check: Check, as_json: bool) -> None:
    if as_json:
        return
    emit(f"{_MARKS[check.verdict]}  {check.name:<18} {check.detail}")
    if check.hint:
        emit(f"         {'':<18} -> {check.hint}")


def register(app: typer.Typer) -> None:
    app.command()(doctor)
