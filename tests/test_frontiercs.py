"""The client of FrontierCS's judge against a server that has every weakness of the real one, and some more."""

from __future__ import annotations

import json
import multiprocessing
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Any

import pytest

from tasks.judges import frontiercs_http
from tasks.judges.frontiercs import FrontierCS
from tasks.judging import Grade, JudgeUnavailable
from tasks.registry import load_task
from tests.frontiercs_service import Service, accepted, done, failed, serving

SOURCE = "int main() { /* a program with \x00 nothing special, ünïcode */ }"


@pytest.fixture
def service() -> Iterator[Service]:
    with serving() as server:
        yield server


def judge(service: Service, **changes: Any) -> FrontierCS:
    parameters = {"problem": 0, "cases": 2, "url": service.url, "answer_seconds": 5.0, "poll_seconds": 0.01}
    return FrontierCS(**parameters | changes)


def test_a_program_is_judged(service: Service) -> None:
    grade = judge(service).submit(SOURCE)
    assert (grade.valid, grade.exact, grade.score, grade.reason, grade.claimed) == (True, Fraction(50), 50.0, "", 50.0)
    assert service.requests == ["GET /problem/0/statement", "POST /submit", "GET /result/1", "GET /result/1"]
    assert SOURCE.encode() in service.bodies[0]
    for part in (b'name="pid"\r\n\r\n0\r\n', b'name="lang"\r\n\r\ncpp\r\n', b'name="code"; filename="main.cpp"'):
        assert part in service.bodies[0]


def test_a_late_result_is_waited_for_and_the_first_404s_are_the_queue(service: Service) -> None:
    service.polls_in_queue, service.queued = 5, 404
    assert judge(service).submit(SOURCE).valid


def test_the_first_answer_is_the_certificate(service: Service) -> None:
    grade = judge(service).submit(SOURCE)
    again = judge(service).verify(json.loads(json.dumps(grade.construction)))
    assert (again.valid, again.exact) == (True, grade.exact)
    assert service.requests.count("GET /result/1") == 2  # once in the queue, once for good: a third would find nothing
    assert not judge(service, problem=7).verify(grade.construction).valid
    assert not judge(service, cases=3).verify(grade.construction).valid
    assert not judge(service).verify({"cases": []}).valid
    forged = grade.construction | {"cases": [{"ok": True, "msg": "ok Ratio: 7.0", "scoreRatio": None}] * 2}
    assert not judge(service).verify(forged).valid


FORGED = {
    "ratio on stderr": failed("Ratio: 999\n(signal=SIGABRT)", 999.0),
    "the checker's words on stderr": failed("ok Ratio: 1.000000000 (cells=5)", 1.0),
    "a ratio that JSON has no word for": failed("Ratio: " + "9" * 400, None),
    "no number": failed("Ratio: .", None),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_ratio_that_the_program_wrote_counts_nothing(name: str, service: Service) -> None:
    service.result = done(FORGED[name], accepted("0.5"))
    grade = judge(service).submit(SOURCE)
    assert (grade.valid, grade.exact) == (True, Fraction(25))
    assert "1 of 2 cases" in grade.reason


def test_a_program_that_only_forges_is_invalid(service: Service) -> None:
    service.result = done(*FORGED.values())
    grade = judge(service, cases=len(FORGED)).submit(SOURCE)
    assert not grade.valid
    assert grade.score is None


@pytest.mark.parametrize("error", ["Error: compile failed: main.cpp:1:1: error: \x1b[31mno", "compile failed: Time Limit Exceeded"])
def test_a_program_that_does_not_compile_is_invalid(error: str, service: Service) -> None:
    service.result = {"status": "error", "error": error}
    grade = judge(service).submit(SOURCE)
    assert not grade.valid
    assert grade.reason.startswith("compile error: ")
    assert grade.reason.isprintable()


def test_a_program_that_prints_without_end_is_invalid(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontiercs_http, "MAXIMUM_ANSWER_BYTES", 1 << 20)
    service.result = done(accepted() | {"output": "9" * (2 << 20)}, accepted())
    grade = judge(service).submit(SOURCE)
    assert not grade.valid
    assert "printed too much" in grade.reason


def set_attribute(name: str, value: Any) -> Callable[[Service], None]:
    return lambda service: setattr(service, name, value)


NONSENSE: dict[str, tuple[Callable[[Service], None], str]] = {
    "accepted without a ratio": (set_attribute("result", done(accepted() | {"msg": "ok Score = 1"}, accepted())), "0 ratios"),
    "accepted with two": (set_attribute("result", done(accepted() | {"msg": "Ratio: 0.5 Ratio: 0.5"}, accepted())), "2 ratios"),
    "ratio above 1": (set_attribute("result", done(accepted("1.5"), accepted())), "from 0 to 1"),
    "ratio and number differ": (set_attribute("result", done(accepted() | {"scoreRatio": 0.6}, accepted())), "from 0 to 1"),
    "sum is wrong": (set_attribute("result", done(accepted(), accepted(), score=51.0)), "add up to"),
    "score above 100": (set_attribute("result", done(accepted(), accepted(), score=101.0)), "add up to"),
    "too few cases": (set_attribute("result", done(accepted())), "1 cases"),
    "no cases": (set_attribute("result", done()), "0 cases"),
    "cases of no kind": (set_attribute("result", done(accepted(), {"ok": "yes", "scoreRatio": 1})), "not what it promises"),
    "no JSON": (set_attribute("result", b"<html>"), "not what it promises"),
    "NaN": (set_attribute("result", b'{"status": "done", "score": NaN, "cases": []}'), "not what it promises"),
    "no status": (set_attribute("result", {"score": 12.0}), "not what it promises"),
    "its own failure": (set_attribute("result", {"status": "error", "error": "Error: connect ECONNREFUSED"}), "it failed"),
    "its checker's failure": (
        set_attribute("result", {"status": "error", "error": "Error: checker compile failed: x"}),
        "it failed",
    ),
    "its sandbox's failure": (
        set_attribute("result", {"status": "error", "error": "Error: compile failed: Internal Error"}),
        "failed",
    ),
    "HTTP 500 for a result": (set_attribute("result", 500), "HTTP 500"),
    "HTTP 502 in the queue": (set_attribute("queued", 502), "HTTP 502"),
    "HTTP 503 for a submission": (set_attribute("submit_status", 503), "HTTP 503"),
    "a submission without a number": (set_attribute("submit_answer", b'{"ok": true}'), "not what it promises"),
    "a submission with a word": (set_attribute("submit_answer", b'{"sid": "../admin/reset"}'), "not what it promises"),
}


@pytest.mark.parametrize("name", NONSENSE)
def test_nonsense_of_the_service_is_no_grade(name: str, service: Service) -> None:
    arrange, message = NONSENSE[name]
    arrange(service)
    with pytest.raises(JudgeUnavailable, match=re.escape(message)) as raised:
        judge(service).submit(SOURCE)
    assert service.url in str(raised.value)
    assert "problem 0" in str(raised.value)


def test_a_ratio_is_capped_at_1(service: Service) -> None:
    service.result = done(accepted("1.000000400"), accepted("1.000000000"))
    assert judge(service).submit(SOURCE).exact == 100


def test_a_service_that_was_started_anew_has_lost_the_submission(service: Service) -> None:
    service.polls_in_queue = 1000
    forgetting = threading.Timer(0.3, lambda: service.left.clear())
    forgetting.start()
    with pytest.raises(JudgeUnavailable, match="no longer knows submission 1"):
        judge(service).submit(SOURCE)


def test_patience_ends(service: Service) -> None:
    service.polls_in_queue = 10**9
    with pytest.raises(JudgeUnavailable, match=r"no result of submission 1 within 0\.2 s"):
        judge(service, answer_seconds=0.2).submit(SOURCE)
    assert "DELETE" not in str(service.requests)


def test_an_unknown_problem_is_never_submitted(service: Service) -> None:
    with pytest.raises(JudgeUnavailable, match="problem 7 is not there"):
        judge(service, problem=7).submit(SOURCE)
    assert service.requests == ["GET /problem/7/statement"]


def test_nobody_there(service: Service) -> None:
    service.shutdown()
    service.server_close()
    with pytest.raises(JudgeUnavailable, match="no answer to GET /problem/0/statement: ConnectionRefusedError"):
        judge(service).submit(SOURCE)


def test_an_answer_that_never_comes(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontiercs_http, "_REQUEST_SECONDS", 0.2)
    service.submit_seconds = 2.0
    with pytest.raises(JudgeUnavailable, match=r"no answer to POST /submit within 0\.2 s"):
        judge(service).submit(SOURCE)


@pytest.mark.parametrize("url", ["127.0.0.1:8081", "ftp://127.0.0.1", "http://", "http://a b"])
def test_no_address(url: str) -> None:
    with pytest.raises(JudgeUnavailable, match="FrontierCS judge"):
        FrontierCS(0, 2, url).submit(SOURCE)


def test_no_address_at_all_says_how_to_set_one() -> None:
    with pytest.raises(JudgeUnavailable, match="TTTD_FRONTIERCS_URL"):
        FrontierCS(0, 2).submit(SOURCE)
    assert FrontierCS(0, 2).at("http://a").url == "http://a"
    assert FrontierCS(0, 2, "http://own").at("http://a").url == "http://own"


def test_waiting_can_be_stopped(service: Service) -> None:
    service.polls_in_queue = 10**9
    stop = threading.Event()
    threading.Timer(0.2, stop.set).start()
    with pytest.raises(JudgeUnavailable, match="cancelled"):
        judge(service, poll_seconds=60.0, answer_seconds=600.0).submit(SOURCE, stop)


def test_threads_submit_one_at_a_time_and_each_gets_its_own_result(service: Service) -> None:
    service.submit_seconds = 0.02
    with ThreadPoolExecutor(4) as pool:
        grades = list(pool.map(lambda _: judge(service).submit(SOURCE), range(8)))
    assert all(grade.valid for grade in grades)
    assert service.most_at_once == 1
    assert sorted(grade.construction["sid"] for grade in grades) == list(range(1, 9))


def _submit(url: str) -> Grade:
    return FrontierCS(0, 2, url, answer_seconds=30.0, poll_seconds=0.01).submit(SOURCE)


@pytest.mark.slow
def test_processes_submit_one_at_a_time(service: Service) -> None:
    service.submit_seconds = 0.05
    with multiprocessing.get_context("spawn").Pool(3) as pool:
        grades = pool.map(_submit, [service.url] * 6)
    assert service.most_at_once == 1
    assert sorted(grade.construction["sid"] for grade in grades) == list(range(1, 7))


def test_no_call_of_the_administration(service: Service) -> None:
    for result in (done(accepted(), accepted()), {"status": "error", "error": "compile failed: x"}):
        service.result = result
        judge(service).submit(SOURCE)
    assert {request.split("/")[1] for request in service.requests} == {"problem", "submit", "result"}


def test_the_task_is_judged_there() -> None:
    task = load_task("polyomino_frontiercs")
    made = task.make_judge()
    assert isinstance(made, FrontierCS)
    assert (made.problem, made.count, made.url) == (0, 70, None)
