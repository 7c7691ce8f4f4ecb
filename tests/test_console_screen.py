"""What a log gets to see of the changing line: something every few seconds, and only when it says something new."""

from __future__ import annotations

import io

from rich.console import Console

from console.screen import PLAIN_SECONDS, LiveScreen, PlainScreen


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_plain_screen_is_silent_when_only_time_passes() -> None:
    lines: list[str] = []
    clock = Clock()
    with PlainScreen(lines.append, clock) as screen:
        screen.show("step 1/8 · judged 3/32 · 4 s · http://ui")
        for seconds in range(60):
            clock.now += 1
            screen.show(f"step 1/8 · judged 3/32 · {seconds + 5} s · http://ui")
    assert lines == ["step 1/8 · judged 3/32 · 4 s · http://ui"]


def test_plain_screen_shows_changes_but_not_too_often() -> None:
    lines: list[str] = []
    clock = Clock()
    screen = PlainScreen(lines.append, clock)
    for judged in range(20):
        screen.show(f"judged {judged}/32 · {judged} s")
        clock.now += 1
    assert len(lines) == 20 / PLAIN_SECONDS
    screen.keep("step 1/8 · best 2.5")
    screen.show("judged 0/32")
    assert lines[-1] == "step 1/8 · best 2.5"
    clock.now += PLAIN_SECONDS
    screen.show("judged 0/32")
    assert lines[-1] == "judged 0/32"


def test_live_screen_keeps_lines_and_leaves_no_changing_line_behind() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, color_system=None)
    with LiveScreen(console) as screen:
        screen.show("step 1/8 · sampling 3/32")
        screen.keep("step 1/8 · [best] 2.5")
        screen.show("step 2/8 · sampling")
    shown = out.getvalue()
    assert "step 1/8 · [best] 2.5" in shown  # brackets are text, not markup
    assert shown.rstrip().endswith("\x1b[2K")  # the changing line is erased at the end
