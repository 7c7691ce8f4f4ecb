"""Client of FrontierCS's judge over HTTP: a service that compiles, runs and scores programs itself. Source: spec tasks 8c.

The service is believed as little as it can be:
    - A case counts by the ratio in its checker's own message, and only if the checker accepted. A program that failed has its
      standard error in the same field, and the service reads a ratio from there too.
    - An accepted case without a ratio counts 1.0 there; here it is a fault of the service.
    - The score is added up here. The service's own number is kept as a claim.
    - The service forgets a result when it has been asked for once, so the first answer is kept, and is the certificate: there is
      no other, and none that could be derived again.
    - Its counter of submissions is not safe against two at a time: one submission is made at once, by all processes of this host.
      Judge workers on several hosts need a service each.
    - A problem that it does not have stops one of its workers for good: it is asked for first.
    - Its administration needs no password, and is never called.

What a program can bring about ends as a grade. Only what it cannot is JudgeUnavailable, which is tried again.
"""

from __future__ import annotations

import math
import re
import threading
import time
from fractions import Fraction
from typing import Any, Final, TypeVar

import msgspec

from tasks.judges.frontiercs_http import Connection, NoAnswer, TooLarge
from tasks.judging import Grade, JudgeUnavailable

ANSWER_SECONDS: Final = 340.0
"""From submission to result."""
POLL_SECONDS: Final = 2.0

_RATIO_SLACK: Final = Fraction(1, 10**6)
"""A ratio is printed with 9 digits, and the service's sum is a double's."""
_REASON_CHARACTERS: Final = 200
_KEPT_MESSAGE_CHARACTERS: Final = 200

_RATIO = re.compile(r"\bRatio: ([0-9]{1,3}(?:\.[0-9]{1,20})?)(?!\.?[0-9])")
_COMPILE_FAILED = re.compile(r"(?:Error: )?compile failed: (.*)", re.DOTALL)


D = TypeVar("D")


class _Submitted(msgspec.Struct):
    sid: int


class _Case(msgspec.Struct):
    """One test case; the service sends more, such as the whole output, which is not read."""

    ok: bool
    msg: str = ""
    score_ratio: float | None = msgspec.field(default=None, name="scoreRatio")
    """None also for a number that JSON has no word for."""


class _Result(msgspec.Struct):
    status: str
    score: float | None = None
    cases: list[_Case] = []
    error: str = ""


class FrontierCS:
    """Judge of one problem of the service.

    Args:
        problem: the service's id of it.
        cases: how many the problem has.
        url: where the service is; None: the worker's settings say so (`TTTD_FRONTIERCS_URL`).
        answer_seconds, poll_seconds: patience.
    """

    service = "frontiercs"

    def __init__(
        self,
        problem: int,
        cases: int,
        url: str | None = None,
        answer_seconds: float = ANSWER_SECONDS,
        poll_seconds: float = POLL_SECONDS,
    ) -> None:
        if cases < 1 or answer_seconds <= 0 or poll_seconds <= 0:
            raise ValueError(f"cases={cases}, answer_seconds={answer_seconds}, poll_seconds={poll_seconds}; all must be positive")
        self.problem = problem
        self.count = cases
        self.url = url
        self._answer_seconds = answer_seconds
        self._poll_seconds = poll_seconds

    def at(self, url: str | None) -> FrontierCS:
        """This judge with an address from the worker's settings; one in the task's parameters takes precedence."""
        return FrontierCS(self.problem, self.count, self.url or url, self._answer_seconds, self._poll_seconds)

    def submit(self, source: str, stop: threading.Event | None = None) -> Grade:
        """The service's grade of a C++ program. Blocks until it is there, or `stop` is set.

        Raises:
            JudgeUnavailable: no address, no answer in time, or one that is not to be trusted; says what to do.
        """
        if self.url is None:
            raise JudgeUnavailable(
                "no FrontierCS judge is known: set TTTD_FRONTIERCS_URL (frontiercs_url in tttd.toml) to its address, such as "
                "http://127.0.0.1:8081"
            )
        try:
            connection = Connection(self.url)
            self._check_problem(connection)
            sid = self._post(connection, source)
            return self._result(connection, sid, stop or threading.Event())
        except TooLarge as large:
            raise self._unavailable(f"an answer is {large}") from None
        except NoAnswer as error:
            raise self._unavailable(str(error)) from None

    def verify(self, construction: Any) -> Grade:
        """A stored answer of the service, added up again. The service's word is all there is: nothing derives it anew."""
        try:
            answer = msgspec.convert(construction, _Stored)
            if answer.problem != self.problem:
                return Grade(valid=False, reason=f"the answer is about problem {answer.problem}, not {self.problem}")
            return self._grade(_Result(status="done", cases=answer.cases), answer.sid)
        except (msgspec.ValidationError, JudgeUnavailable) as error:
            return Grade(valid=False, reason=f"not a stored answer: {error}"[:_REASON_CHARACTERS])

    def _check_problem(self, connection: Connection) -> None:
        answer = connection.get(f"/problem/{self.problem}/statement")
        if answer.status != 200:
            raise self._unavailable(
                f"problem {self.problem} is not there (HTTP {answer.status}); nothing was submitted, since an unknown problem "
                "stops one of its workers"
            )

    def _post(self, connection: Connection, source: str) -> int:
        with connection.alone(self._answer_seconds):
            answer = connection.submit({"pid": str(self.problem), "lang": "cpp"}, source)
        if answer.status not in (200, 201, 202):
            raise self._unavailable(f"it answered a submission with HTTP {answer.status}")
        return self._decoded(answer.body, _Submitted).sid

    def _result(self, connection: Connection, sid: int, stop: threading.Event) -> Grade:
        try:
            return self._grade(self._wait(connection, sid, stop), sid)
        except TooLarge as large:  # it holds what the program printed
            return Grade(valid=False, reason=f"the program printed too much: the service's answer is {large}")

    def _wait(self, connection: Connection, sid: int, stop: threading.Event) -> _Result:
        """The result of a submission, from the only request that gets one."""
        deadline = time.monotonic() + self._answer_seconds
        was_queued = False
        while not stop.wait(self._poll_seconds):
            # A lost answer is lost for ever: a failed request ends the wait, instead of leading to another.
            answer = connection.get(f"/result/{sid}")
            if answer.status == 200:
                result = self._decoded(answer.body, _Result)
                if result.status in ("done", "error"):
                    return result
                was_queued = True
            elif answer.status != 404:
                raise self._unavailable(f"it answered for submission {sid} with HTTP {answer.status}")
            elif was_queued:
                raise self._unavailable(f"it no longer knows submission {sid}, which was in its queue; was it started anew?")
            if time.monotonic() > deadline:
                raise self._unavailable(f"no result of submission {sid} within {self._answer_seconds:g} s")
        raise self._unavailable(f"waiting for submission {sid} was cancelled")

    def _grade(self, result: _Result, sid: int) -> Grade:
        if result.status == "error":
            return self._failure(result.error)
        if len(result.cases) != self.count:
            raise self._unavailable(f"it judged {len(result.cases)} cases, problem {self.problem} has {self.count}")
        ratios = [self._ratio(index, case) for index, case in enumerate(result.cases)]
        exact = 100 * sum(ratios, Fraction(0)) / self.count
        claimed = result.score if result.score is not None and math.isfinite(result.score) else None
        accepted = sum(case.ok for case in result.cases)
        if accepted == self.count and claimed is not None:
            self._check_sum(claimed, exact)
        if accepted == 0:
            return Grade(valid=False, reason="the checker accepted no case", claimed=claimed)
        refused = self.count - accepted
        return Grade(
            valid=True,
            reason=f"the checker did not accept {refused} of {self.count} cases; they score 0" if refused else "",
            exact=exact,
            score=_round_down(exact),
            construction=self._stored(result, sid),
            claimed=claimed,
        )

    def _ratio(self, index: int, case: _Case) -> Fraction:
        """What a case counts: 0 unless the checker accepted it, whatever stands in the message of a program that failed."""
        if not case.ok:
            return Fraction(0)
        found = _RATIO.findall(case.msg)
        if len(found) != 1:
            raise self._unavailable(
                f"its checker accepted case {index} with {len(found)} ratios in {case.msg[:80]!r}; this is not the version of the "
                "judge that problem needs"
            )
        ratio = Fraction(found[0])
        told = case.score_ratio
        if ratio > 1 + _RATIO_SLACK or (told is not None and not abs(told - ratio) <= _RATIO_SLACK):
            raise self._unavailable(
                f"case {index} has a ratio of {found[0]} and counts {told}; both must be one number from 0 to 1"
            )
        return min(ratio, Fraction(1))

    def _check_sum(self, told: float, exact: Fraction) -> None:
        if abs(Fraction(told) - exact) > 100 * _RATIO_SLACK:
            raise self._unavailable(f"it says {told}, its cases add up to {float(exact):.9f}")

    def _failure(self, error: str) -> Grade:
        """A program that does not compile is invalid; anything else that stops the service is not the program's."""
        compiling = _COMPILE_FAILED.fullmatch(error)
        if compiling is None or compiling[1].strip() == "Internal Error":
            raise self._unavailable(f"it failed: {error[:_REASON_CHARACTERS]!r}")
        message = " ".join("".join(c if c.isprintable() else " " for c in compiling[1][: 4 * _REASON_CHARACTERS]).split())
        return Grade(valid=False, reason=f"compile error: {message}"[:_REASON_CHARACTERS])

    def _stored(self, result: _Result, sid: int) -> dict[str, Any]:
        cases = [
            {"ok": case.ok, "msg": case.msg[:_KEPT_MESSAGE_CHARACTERS] if case.ok else "", "scoreRatio": None}
            for case in result.cases
        ]
        return {"service": self.service, "problem": self.problem, "sid": sid, "cases": cases}

    def _decoded(self, body: bytes, kind: type[D]) -> D:
        try:
            return msgspec.json.decode(body, type=kind)
        except (msgspec.DecodeError, RecursionError) as error:
            raise self._unavailable(f"its answer is not what it promises: {error}") from None

    def _unavailable(self, why: str) -> JudgeUnavailable:
        return JudgeUnavailable(
            f"FrontierCS judge at {self.url}: {why}; see that it runs, and is a judge of problem {self.problem}"
        )


class _Stored(msgspec.Struct, forbid_unknown_fields=True):
    """The first answer, as a verdict keeps it."""

    service: str
    problem: int
    sid: int
    cases: list[_Case]


def _round_down(number: Fraction) -> float:
    nearest = number.numerator / number.denominator
    return math.nextafter(nearest, -math.inf) if Fraction(nearest) > number else nearest
