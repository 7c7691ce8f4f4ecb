"""Replays the parsing of guidance and executor responses. Source: spec algorithm 5. Lines at a program's ends are not compared."""

from __future__ import annotations

from typing import Any

from activities.sample.guidance import GuidanceFault, parse_executor_response, parse_guidance
from tests.golden.outcome import Case


def replay_guidance_file(data: dict[str, Any]) -> list[Case]:
    """Every response of both parts of the file; a part that is empty or missing gives no case."""
    cases = [replay_guidance(f"guidance {name}", record) for name, record in data.get("guidance", {}).items()]
    return cases + [replay_executor(f"executor {name}", record) for name, record in data.get("executor", {}).items()]


def replay_guidance(name: str, record: dict[str, Any]) -> Case:
    """One policy response: the guidance, or the class of its error."""
    case = Case(name)
    found = parse_guidance(record["text"])
    faulty = isinstance(found, GuidanceFault)
    case.same("guidance", None if faulty else found, record["guidance"])
    case.same("error", found.error.value if isinstance(found, GuidanceFault) else None, record["error"])
    return case


def replay_executor(name: str, record: dict[str, Any]) -> Case:
    """One executor response: program and terminal summary."""
    case = Case(name)
    found = parse_executor_response(record["text"], record["language"])
    case.same("program", _trimmed(found.program), _trimmed(record["solution"]))
    case.same("summary", found.summary, record["summary"])
    return case


def _trimmed(program: str | None) -> str | None:
    return None if program is None else program.replace("\r\n", "\n").strip("\n")
