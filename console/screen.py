"""Where a followed run is shown: lines that stay, and one line that changes. On a terminal the changing line is redrawn in place;
elsewhere it is printed anew every few seconds, and only when it says something new.

Writes to stderr: stdout is for data. Knows no run. NO_COLOR and dumb terminals are rich's business.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

PLAIN_SECONDS = 5.0
_ELAPSED = re.compile(r" · (\d+ s|\d+m\d\ds|\d+h\d\dm)(?= · |$)")


class Screen(ABC):
    """Use as a context manager, so that a terminal is left as it was found."""

    @abstractmethod
    def keep(self, text: str, *, loud: bool = False) -> None:
        """A line that stays; `loud` for what asks for an action."""

    @abstractmethod
    def show(self, text: str) -> None:
        """The changing line."""

    def __enter__(self) -> Screen:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return None


class LiveScreen(Screen):
    """A terminal."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._spinner = Spinner("dots", text="")
        self._live = Live(self._spinner, console=console, refresh_per_second=8, transient=True, redirect_stdout=False)

    def keep(self, text: str, *, loud: bool = False) -> None:
        self._console.print(Text(text, style="bold" if loud else ""))

    def show(self, text: str) -> None:
        self._spinner.update(text=Text(text, style="dim", overflow="ellipsis", no_wrap=True))

    def __enter__(self) -> LiveScreen:
        self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._live.stop()


class PlainScreen(Screen):
    """A log or a pipe.

    Args:
        write: prints one line.
        clock: monotonic seconds.
    """

    def __init__(self, write: Callable[[str], None], clock: Callable[[], float]) -> None:
        self._write = write
        self._clock = clock
        self._shown = ""
        self._next = 0.0

    def keep(self, text: str, *, loud: bool = False) -> None:
        self._write(text)
        self._next = self._clock() + PLAIN_SECONDS

    def show(self, text: str) -> None:
        # The elapsed time changes always and says nothing by itself.
        said = _ELAPSED.sub("", text)
        if said == self._shown or self._clock() < self._next:
            return
        self._write(text)
        self._shown = said
        self._next = self._clock() + PLAIN_SECONDS


def open_screen(write: Callable[[str], None], clock: Callable[[], float]) -> Screen:
    """The right screen for stderr."""
    console = Console(stderr=True, highlight=False)
    return LiveScreen(console) if console.is_terminal and not console.is_dumb_terminal else PlainScreen(write, clock)
