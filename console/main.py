"""The `tttd` command. Knows its commands by name only; each imports what it needs when it is called, so that --help is fast."""

from __future__ import annotations

import sys
from typing import NoReturn

import typer

import workers  # noqa: F401  its import checks that the five packages are ours
from console.cli import (
    baseline,
    best,
    control,
    demo,
    doctor,
    export,
    fork,
    judge,
    metrics,
    plan,
    polish,
    run,
    sandbox,
    services,
    status,
    storage,
    task,
    verify,
    watch,
)

app = typer.Typer(
    name="tttd",
    help="Test-time training for discovery: a language model searches for the best answer and learns while it searches.",
    epilog="Exit codes: 0 ok, 1 failed, 2 usage, 3 the run failed or is blocked, 4 not valid.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for module in (
    demo,
    run,
    status,
    watch,
    best,
    metrics,
    control,
    fork,
    judge,
    verify,
    baseline,
    polish,
    task,
    plan,
    storage,
    export,
    services,
    sandbox,
    doctor,
):
    module.register(app)


def main() -> NoReturn:
    """Run one command and end the process with its exit code."""
    code: int | str | None = 0
    try:
        app()
    except SystemExit as end:
        code = end.code
    if isinstance(code, str):
        print(code, file=sys.stderr)
        code = 1
    if "temporalio" in sys.modules:
        from workers.connect import leave

        leave(code or 0)
    raise SystemExit(code or 0)


if __name__ == "__main__":
    main()
