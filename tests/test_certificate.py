"""Certificates: what they hold, which files they are made of, and an independent checker that refuses every tampered one."""

from __future__ import annotations

import ast
import copy
import json
import math
import sys
from fractions import Fraction
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.candidates import CandidateError, read_candidate
from tasks.certificate import Certificate, Refused, certificate_schema, certify, directed_digits
from tasks.errors import TaskError
from tasks.registry import load_task
from tests import checker
from tests.constructions import FOLDER, certificate_of, read_files

ROOT = Path(__file__).parent.parent
SCHEMA = json.loads((ROOT / "docs" / "certificate.schema.json").read_text(encoding="utf-8"))
FILES = read_files(FOLDER)
SAMPLES = {
    "packing": "cp26_reef_qwen3_8b.json",
    "exact packing": "cp32_certified_rational.json",
    "erdos": "erdos_haugland_51.json",
    "ac1": "ac1_prev_human.json",
    "ac2": "ac2_thetaevolve_AlphaEvolve_v1.json",
}


@pytest.fixture(scope="module")
def certificates() -> dict[str, Certificate]:
    return {name: certificate_of(FILES[file]) for name, file in SAMPLES.items()}


def refused(document: dict[str, Any]) -> str:
    """The checker's sentence."""
    with pytest.raises(checker.Wrong) as caught:
        checker.check(document)
    return str(caught.value)


# Certificates ---------------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", SAMPLES)
def test_a_certificate_is_what_the_schema_says(name: str, certificates: dict[str, Certificate]) -> None:
    document = json.loads(certificates[name].model_dump_json())
    jsonschema.Draft202012Validator(SCHEMA).validate(document)
    checker.check(document)
    value, score = Fraction(document["exact"]), Fraction(document["score"])
    digits = Fraction(document["digits"])
    better = max if document["direction"] == "maximize" else min
    assert better(value, score, digits) == value
    assert abs(digits - value) < Fraction(1, 10**40)
    assert document["judge"]["name"].startswith("tasks.judges.")


def test_the_schema_is_the_models() -> None:
    assert certificate_schema() == SCHEMA
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("name", SAMPLES)
def test_a_certificate_certifies_itself(name: str, certificates: dict[str, Certificate]) -> None:
    first = certificates[name]
    again = certificate_of(json.loads(first.model_dump_json()))
    assert again.model_copy(update={"repair": first.repair}) == first
    assert again.repair == ""


def test_what_was_done_and_claimed_stands_in_it(certificates: dict[str, Certificate]) -> None:
    packing = certificates["packing"]
    assert packing.repair.startswith("radii shrunk by 3.57e-15")
    assert packing.claimed is not None
    assert packing.claimed > packing.score
    assert [(check.family, check.count) for check in packing.checks] == [("radii", 26), ("walls", 104), ("pairs", 325)]
    assert [(check.family, check.count) for check in certificates["erdos"].checks] == [
        ("range", 102),
        ("integral", 1),
        ("overlap", 101),
    ]
    assert [(check.family, check.count) for check in certificates["ac1"].checks] == [
        *(("heights", 208), ("mass", 1), ("autoconvolution", 415))
    ]
    assert certificates["exact packing"].repair == ""


def test_a_single_circle_has_no_pairs() -> None:
    task = load_task("circle_packing_26").model_copy(update={"judge_parameters": {"circles": 1}})
    answer = certify(task, task.make_judge(), read_candidate(b"[[[0.5, 0.5]], [0.5]]"))
    assert isinstance(answer, Certificate)
    pairs = answer.checks[2]
    assert (pairs.family, pairs.count, pairs.tightest, pairs.at) == ("pairs", 0, None, ())
    checker.check(json.loads(answer.model_dump_json()))


def test_an_invalid_construction_gets_a_reason() -> None:
    task = load_task("circle_packing_26")
    answer = certify(task, task.make_judge(), read_candidate(b"[[[0.5, 0.5]], [0.5]]"))
    assert isinstance(answer, Refused)
    assert "exactly 26" in answer.reason
    jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(answer.model_dump_json()))


class _Service:
    """A judge that is somebody else's service."""


class _Liar:
    """A judge that stores something else than it graded."""

    def __init__(self) -> None:
        self.judge = load_task("circle_packing_26").make_judge()

    def grade(self, result: bytes) -> Any:
        return self.judge.grade(result)

    def verify(self, construction: Any) -> Any:
        grade = self.judge.verify(construction)
        return type(grade)(**{**vars(grade), "exact": grade.exact + 1})


def test_a_judge_that_cannot_certify_is_named() -> None:
    task = load_task("circle_packing_26")
    candidate = read_candidate(json.dumps(FILES["cp26_alphaevolve_v1.json"]).encode())
    with pytest.raises(TaskError, match="with `tttd judge`"):
        certify(task, _Service(), candidate)  # type: ignore[arg-type]
    with pytest.raises(RuntimeError, match="mistake of the judge"):
        certify(task, _Liar(), candidate)  # type: ignore[arg-type]


@given(st.fractions(), st.integers(1, 30))
def test_digits_are_never_on_the_other_side(number: Fraction, decimals: int) -> None:
    down, up = (Fraction(directed_digits(number, rounding, decimals)) for rounding in ("down", "up"))  # type: ignore[arg-type]
    assert down <= number <= up
    assert up - down <= Fraction(1, 10**decimals)
    assert (up == down) == (number * 10**decimals == int(number * 10**decimals))


# The independent checker ----------------------------------------------------------------------------------------------------------
def test_the_checker_shares_nothing_with_us() -> None:
    tree = ast.parse((ROOT / "tests" / "checker.py").read_text(encoding="utf-8"))
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    assert set(names) <= sys.stdlib_module_names


def bump(text: str, by: int = 1) -> str:
    return str(int(text) + by)


def tamper_digit(document: dict[str, Any]) -> None:
    digits = document["digits"]
    document["digits"] = digits[:-1] + str((int(digits[-1]) + 1) % 10)


def tamper_exact(document: dict[str, Any]) -> None:
    above, _, below = document["exact"].partition("/")
    document["exact"] = f"{bump(above)}/{below}"


def tamper_score(document: dict[str, Any]) -> None:
    document["score"] = math.nextafter(document["score"], math.inf if document["direction"] == "maximize" else -math.inf)


def tamper_score_the_other_way(document: dict[str, Any]) -> None:
    document["score"] = math.nextafter(document["score"], -math.inf if document["direction"] == "maximize" else math.inf)


def tamper_rounding(document: dict[str, Any]) -> None:
    document["rounding"] = "up" if document["rounding"] == "down" else "down"


def tamper_direction(document: dict[str, Any]) -> None:
    document["direction"] = "maximize" if document["direction"] == "minimize" else "minimize"


def tamper_count(document: dict[str, Any]) -> None:
    document["checks"][1]["count"] += 1


def tamper_slack(document: dict[str, Any]) -> None:
    document["checks"][0]["tightest"] = "1/3"


def tamper_place(document: dict[str, Any]) -> None:
    document["checks"][2]["at"] = [0, 1, 2]


def tamper_families(document: dict[str, Any]) -> None:
    document["checks"].pop()


def tamper_problem(document: dict[str, Any]) -> None:
    document["problem"] = {"first_autocorrelation": "second_autocorrelation"}.get(document["problem"], "first_autocorrelation")


def tamper_format(document: dict[str, Any]) -> None:
    document["format"] = "tttd-certificate/2"


def tamper_size(document: dict[str, Any]) -> None:
    construction = document["construction"]
    construction["circles" if "circles" in construction else "heights"].pop()


def tamper_keys(document: dict[str, Any]) -> None:
    document["construction"]["comment"] = "1"


EVERYWHERE = [
    *(tamper_digit, tamper_exact, tamper_score, tamper_score_the_other_way, tamper_rounding, tamper_direction, tamper_count),
    *(tamper_slack, tamper_place, tamper_families, tamper_problem, tamper_format, tamper_size, tamper_keys),
]


@pytest.mark.parametrize("tamper", EVERYWHERE, ids=lambda f: f.__name__)
@pytest.mark.parametrize("name", SAMPLES)
def test_tampering_is_refused(name: str, tamper: Any, certificates: dict[str, Certificate]) -> None:
    document = json.loads(certificates[name].model_dump_json())
    changed = copy.deepcopy(document)
    tamper(changed)
    assert changed != document
    assert refused(changed)


def consistent(document: dict[str, Any], value: Fraction) -> None:
    """Give a document the numbers that a liar would: everything fits the value that it claims."""
    rounding = document["rounding"]
    document["exact"] = f"{value.numerator}/{value.denominator}"
    document["digits"] = directed_digits(value, rounding)
    nearest = value.numerator / value.denominator
    worse = -math.inf if rounding == "down" else math.inf
    wrong_side = Fraction(nearest) > value if rounding == "down" else Fraction(nearest) < value
    document["score"] = math.nextafter(nearest, worse) if wrong_side else nearest


@pytest.mark.parametrize("by", [1, 10**12])
def test_a_larger_radius_is_refused_even_if_all_numbers_fit(by: int, certificates: dict[str, Certificate]) -> None:
    document = json.loads(certificates["packing"].model_dump_json())
    circles, unit = document["construction"]["circles"], int(document["construction"]["denominator"])
    touching = document["checks"][1]["at"][0]
    circles[touching][2] = bump(circles[touching][2], by)
    consistent(document, Fraction(sum(int(r) for _, _, r in circles), unit))
    assert "violated by" in refused(document)


def test_an_overlap_of_one_unit_is_refused(certificates: dict[str, Certificate]) -> None:
    document = json.loads(certificates["exact packing"].model_dump_json())
    circles, unit = document["construction"]["circles"], int(document["construction"]["denominator"])
    for circle in circles:  # every radius a little larger than the slack that its maker left: 1e-38 of 1e40
        circle[2] = bump(circle[2], 101)
    consistent(document, Fraction(sum(int(r) for _, _, r in circles), unit))
    assert "violated" in refused(document)


def test_a_height_that_changes_the_mass_is_refused(certificates: dict[str, Certificate]) -> None:
    document = json.loads(certificates["erdos"].model_dump_json())
    heights = document["construction"]["heights"]
    middle = len(heights) // 2 - 5
    heights[middle] = bump(heights[middle], -1)
    assert "integral is off" in refused(document)
    heights[middle + 1] = bump(heights[middle + 1])  # the mass is right again, the function is another
    assert "exact value is another" in refused(document)


@pytest.mark.parametrize("height", ["-1", "x", "1.0", 1, "１"])
def test_heights_outside_and_no_numbers_are_refused(height: Any, certificates: dict[str, Certificate]) -> None:
    for name in ("erdos", "ac1"):
        document = json.loads(certificates[name].model_dump_json())
        document["construction"]["heights"][0] = height
        assert refused(document)


def test_the_command_names_what_is_wrong(
    certificates: dict[str, Certificate], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad, broken = tmp_path / "good.json", tmp_path / "bad.json", tmp_path / "broken.json"
    document = json.loads(certificates["ac2"].model_dump_json())
    good.write_text(json.dumps(document))
    bad.write_text(json.dumps(document | {"digits": "1." + "0" * 40}))
    broken.write_text("{}")
    assert checker.main([str(good)]) == 0
    assert checker.main([str(good), str(bad)]) == 1
    assert checker.main([str(broken)]) == 1
    assert checker.main([]) == 1
    out = capsys.readouterr().out
    assert f"{bad}: the digits are rounded to another number" in out
    assert f"{broken}: malformed" in out


# Files ----------------------------------------------------------------------------------------------------------------------------
def test_each_form_is_recognised() -> None:
    stored = {"circles": [["1", "1", "1"]], "denominator": "2"}
    assert read_candidate(b"[[0.5, 0.5], 0.5, 2]").result == b"[[0.5, 0.5], 0.5, 2]"
    values = read_candidate(b'{"task": "ac1", "values": [1, 2.5], "claimed": 1.5}')
    assert (values.result, values.construction, values.task, values.claimed) == (b"[1, 2.5]", None, "ac1", 1.5)
    assert read_candidate(b'{"circles": [[0.1, 0.2, 0.3]]}').result == b"[[[0.1, 0.2]], [0.3]]"
    assert read_candidate(json.dumps(stored).encode()).construction == stored
    scaled = read_candidate(b'{"circles_int": [["5", 5, "1"]], "scale": "1e1"}')
    assert scaled.construction == {"circles": [["5", "5", "1"]], "denominator": "10"}
    assert read_candidate(b'{"heights": ["1"], "denominator": "2"}').construction == {"heights": ["1"], "denominator": "2"}
    verdict = {"task": "t", "construction": stored, "judge_digest": "0", "score": 1}
    assert read_candidate(json.dumps(verdict).encode()).construction == stored
    assert read_candidate(b'{"values": [1], "claimed": NaN}').claimed is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "not JSON"),
        (b"\xff", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"3", "holds a int"),
        (b"{}", "the keys none"),
        (b'{"task": "ac1", "denominator": "2"}', "the keys denominator, task"),
        (b'{"construction": null}', "the keys construction"),
        (b'{"circles": [[1, 2]]}', "rows"),
        (b'{"circles_int": [[1, 2, 3]], "scale": "x"}', "'x'"),
        (b'{"circles_int": [[1, 2, 3]], "scale": "1e-3"}', "whole number"),
        (b'{"circles_int": [[1, 2, 3]], "scale": "1e999999999"}', "whole number"),
        (b'{"circles_int": [[1, 2, 3]], "scale": "NaN"}', "whole number"),
        (b'{"circles_int": 3}', "rows"),
    ],
)
def test_other_files_are_refused_with_what_was_found(text: bytes, words: str) -> None:
    with pytest.raises(CandidateError, match=words):
        read_candidate(text)
