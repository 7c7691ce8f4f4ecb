"""What goes where: data to stdout, progress and errors to stderr, and one exit code per kind of ending.

Knows no command. Source of the exit codes: spec users 3.1.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, Final, ParamSpec

import typer

OK: Final = 0
FAILED: Final = 1
"""The command could not do what it was asked."""
USAGE: Final = 2
"""The command was asked for something that does not exist: a field, a value, a setting."""
RUN_FAILED: Final = 3
"""The run that the command followed is blocked or has failed."""
VERIFICATION_FAILED: Final = 4
"""A program or an answer is not valid."""
INTERRUPTED: Final = 130

P = ParamSpec("P")


class Failure(Exception):
    """Ends a command with a sentence on stderr and an exit code."""

    def __init__(self, message: str, code: int = FAILED) -> None:
        super().__init__(message)
        self.code = code


def say(text: str = "") -> None:
    """One line of progress, to stderr."""
    print(text, file=sys.stderr, flush=True)


def emit(text: str) -> None:
    """Data, to stdout."""
    print(text, flush=True)


def emit_json(value: Any) -> None:
    """One JSON document, to stdout. Takes a pydantic model or plain data."""
    plain = value.model_dump(mode="json") if hasattr(value, "model_dump") else value
    emit(json.dumps(plain, indent=2, ensure_ascii=False, allow_nan=False))


def command(function: Callable[P, int | None]) -> Callable[P, None]:
    """Make a function that returns an exit code a command: every error becomes one sentence and a code."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            code = function(*args, **kwargs)
        except (typer.Exit, typer.BadParameter):
            raise
        except BrokenPipeError:  # whoever read our output has seen enough; nothing may be written to it at exit either
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = OK
        except KeyboardInterrupt:
            say("interrupted")
            code = INTERRUPTED
        except SystemExit as stop:  # settings and roles end like this, with a sentence of their own
            code = stop.code if isinstance(stop.code, int) else USAGE
            if isinstance(stop.code, str):
                say(stop.code)
        except Exception as error:
            code = _report(error)
        raise typer.Exit(code or OK)

    return run


def sentence(error: BaseException) -> str:
    """An error in one line. What nobody foresaw also says its type, and how to see where it came from."""
    from console.store_answers import is_of_s3, silent_text

    if is_of_s3(error):
        return silent_text(error)
    text = " ".join(str(error).split()) or "no message"
    return text if _is_foreseen(error) else f"unexpected {type(error).__name__}: {text} (TTTD_DEBUG=true shows where)"


def _report(error: Exception) -> int:
    if _debug():
        traceback.print_exception(error)
    say(f"tttd: {error if isinstance(error, Failure) else sentence(error)}")
    return error.code if isinstance(error, Failure) else FAILED


def _is_foreseen(error: BaseException) -> bool:
    from activities.errors import TttdError
    from tasks.registry import TaskError

    # Services and connections raise RuntimeErrors that say what to do; a subclass (RPCError, RecursionError) is something else.
    return isinstance(error, Failure | TttdError | TaskError) or type(error) is RuntimeError


def _debug() -> bool:
    from workers.settings import load_settings

    try:
        return load_settings().debug
    except SystemExit:  # the settings themselves are wrong, which is reported already
        return False
