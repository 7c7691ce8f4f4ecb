"""The judge of polyomino packing: its cases, its exactness, and every rule that an output can break."""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Sequence
from fractions import Fraction

import pytest

from tasks.judges.polyomino import MAXIMUM_OUTPUT_BYTES, PolyominoPacking
from tasks.judges.polyomino_cases import case_set, polyominoes
from tasks.judging import CaseRun, Grade

JUDGE = PolyominoPacking(cases=2, final_cases=2)
Cell = tuple[int, int]


def pieces_of(stdin: bytes) -> list[list[Cell]]:
    numbers = iter(map(int, stdin.split()))
    return [[(next(numbers), next(numbers)) for _ in range(next(numbers))] for _ in range(next(numbers))]


def transformed(cells: Sequence[Cell], turns: int, mirror: int) -> list[Cell]:
    """The statement, word for word."""
    if mirror:
        cells = [(-x, y) for x, y in cells]
    for _ in range(turns):
        cells = [(y, -x) for x, y in cells]
    return list(cells)


def placed(pieces: list[list[Cell]], turns_and_mirrors: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Rows X, Y, R, F that put the pieces above each other, each on its left edge."""
    rows, top = [], 0
    for cells, (turns, mirror) in zip(pieces, turns_and_mirrors, strict=True):
        turned = transformed(cells, turns, mirror)
        left, bottom = min(x for x, _ in turned), min(y for _, y in turned)
        rows.append([-left, top - bottom, turns, mirror])
        top += max(y for _, y in turned) - bottom + 1
    return rows


def text(width: int, height: int, rows: list[list[int]]) -> bytes:
    return "\n".join([f"{width} {height}", *(" ".join(map(str, row)) for row in rows)]).encode()


def stacked(case: int, judge: PolyominoPacking = JUDGE) -> tuple[int, int, list[list[int]]]:
    """A valid packing of one of the judge's cases, in all orientations."""
    pieces = pieces_of(judge.cases()[case].stdin)
    rows = placed(pieces, [(k % 4, k // 4 % 2) for k in range(len(pieces))])
    return 10, 10 * len(pieces), rows


def ok(output: bytes) -> CaseRun:
    return CaseRun("ok", output, 0.1)


def both(first: bytes, judge: PolyominoPacking = JUDGE) -> Grade:
    """The grade of an output for case 0 beside a valid one for case 1."""
    return judge.grade_runs([ok(first), ok(text(*stacked(1, judge)))])


def reference(output: bytes, pieces: list[list[Cell]]) -> Fraction | None:
    """An independent checker with sets: the score of one case, None if invalid."""
    width, height, *numbers = map(int, output.split())
    if len(numbers) != 4 * len(pieces):
        return None
    seen: set[Cell] = set()
    for k, cells in enumerate(pieces):
        x0, y0, turns, mirror = numbers[4 * k : 4 * k + 4]
        for x, y in transformed(cells, turns, mirror):
            cell = x + x0, y + y0
            if cell in seen or not (0 <= cell[0] < width and 0 <= cell[1] < height):
                return None
            seen.add(cell)
    return Fraction(len(seen), width * height)


def test_there_are_as_many_polyominoes_as_mathematics_says() -> None:
    assert [len(shapes) for shapes in polyominoes(10)] == [1, 1, 2, 5, 12, 35, 108, 369, 1285, 4655]


def test_cases_are_the_same_on_every_machine() -> None:
    assert case_set(1, 2).digest == "530ac0eafe534a67"


def test_a_small_set_is_the_beginning_of_a_large_one() -> None:
    assert [c.stdin for c in PolyominoPacking(cases=4).cases()][:2] == [c.stdin for c in JUDGE.cases()]


def test_hidden_cases_are_others() -> None:
    public, hidden = JUDGE.cases(), JUDGE.final_cases()
    assert len(hidden) == 2
    assert not {case.stdin for case in public} & {case.stdin for case in hidden}
    assert [c.stdin for c in JUDGE.final_judge().cases()] == [c.stdin for c in hidden]


def test_pieces_are_polyominoes_of_every_size_in_any_orientation() -> None:
    pieces = [piece for case in PolyominoPacking(cases=4).cases() for piece in pieces_of(case.stdin)]
    assert {len(piece) for piece in pieces} >= {7, 8, 9, 10}
    assert sum(len(piece) == 10 for piece in pieces) / len(pieces) == pytest.approx(4655 / 6473, abs=0.05)
    for piece in pieces[:500]:
        assert len(set(piece)) == len(piece)
        reached, frontier = {piece[0]}, [piece[0]]
        while frontier:
            x, y = frontier.pop()
            near = {(x + 1, y), (x - 1, y), (x, y + 1), (x, y - 1)} & set(piece) - reached
            reached |= near
            frontier += near
        assert reached == set(piece)
        assert min(x for x, _ in piece) == min(y for _, y in piece) == 0
    wide = [max(x for x, _ in p) - max(y for _, y in p) for p in pieces]
    assert min(wide) < 0 < max(wide)


def test_number_of_pieces_is_uniform_in_its_logarithm() -> None:
    counts = [len(case.sizes) for case in case_set(1, 70).cases]
    assert all(100 <= n <= 10_000 for n in counts)
    assert 20 < sum(n < 1000 for n in counts) < 50


def test_score_is_the_exact_mean_of_the_densities() -> None:
    outputs = [text(*stacked(case)) for case in range(2)]
    grade = JUDGE.grade_runs([ok(output) for output in outputs])
    densities = [reference(o, pieces_of(c.stdin)) for o, c in zip(outputs, JUDGE.cases(), strict=True)]
    assert grade.valid
    assert grade.reason == ""
    assert None not in densities
    assert grade.exact == 100 * sum(d for d in densities if d is not None) / 2
    assert grade.score is not None
    assert Fraction(grade.score) <= grade.exact < Fraction(grade.score) * (1 + Fraction(1, 2**52))


@pytest.mark.parametrize("turns", range(4))
@pytest.mark.parametrize("mirror", range(2))
def test_mirror_then_turns_then_shift(turns: int, mirror: int) -> None:
    pieces = pieces_of(JUDGE.cases()[0].stdin)
    rows = placed(pieces, [(turns, mirror)] * len(pieces))
    output = text(10, 10 * len(pieces), rows)
    assert reference(output, pieces) is not None
    assert both(output).reason == ""


WIDTH, HEIGHT, ROWS = stacked(0)
LAST = len(ROWS) - 1


def changed(row: int, column: int, value: int) -> bytes:
    rows = [list(r) for r in ROWS]
    rows[row][column] = value
    return text(WIDTH, HEIGHT, rows)


BROKEN = {
    "nothing": (b"", "has 0 numbers"),
    "blank": (b" \n" * 10, "has 0 numbers"),
    "one piece short": (text(WIDTH, HEIGHT, ROWS[:-1]), "are"),
    "trailing number": (text(WIDTH, HEIGHT, ROWS) + b"\n7", "numbers in its output"),
    "a word": (text(WIDTH, HEIGHT, ROWS).replace(b"10 ", b"ten ", 1), "not a decimal integer"),
    "a fraction": (text(WIDTH, HEIGHT, ROWS).replace(b"10 ", b"10.0 ", 1), "not a decimal integer"),
    "underscores": (text(WIDTH, HEIGHT, ROWS).replace(b"10 ", b"1_0 ", 1), "not a decimal integer"),
    "leading zero": (text(WIDTH, HEIGHT, ROWS).replace(b"10 ", b"010 ", 1), "not a decimal integer"),
    "plus sign": (text(WIDTH, HEIGHT, ROWS).replace(b"10 ", b"+10 ", 1), "not a decimal integer"),
    "negative zero": (text(WIDTH, HEIGHT, ROWS).replace(b" 0", b" -0", 1), "not a decimal integer"),
    "hexadecimal": (text(WIDTH, HEIGHT, ROWS).replace(b"10 ", b"0xa ", 1), "not a decimal integer"),
    "other digits": (text(WIDTH, HEIGHT, ROWS).replace(b"10 ", "١٠ ".encode(), 1), "not a decimal integer"),
    "a NUL": (text(WIDTH, HEIGHT, ROWS).replace(b"10 ", b"10\0 ", 1), "not a decimal integer"),
    "14 digits": (changed(0, 0, 10**13), "not a decimal integer"),
    "X too far": (changed(3, 0, 4 * 10**12 + 1), "X=4000000000001 for piece 3"),
    "Y too far": (changed(3, 1, -(4 * 10**12) - 1), "Y=-4000000000001 for piece 3"),
    "R of 4": (changed(5, 2, 4), "R=4 for piece 5"),
    "R of -1": (changed(5, 2, -1), "R=-1 for piece 5"),
    "F of 2": (changed(5, 3, 2), "F=2 for piece 5"),
    "no width": (text(0, HEIGHT, ROWS), "a rectangle of 0 x"),
    "negative height": (text(WIDTH, -5, ROWS), "a rectangle of 10 x -5"),
    "width too large": (text(4 * 10**12 + 1, 1, ROWS), "between 1 and 4e12"),
    "area of 2^63": (text(2**32, 2**31, ROWS), "less than 2^63"),
    "outside on the left": (changed(0, 0, ROWS[0][0] - 1), "outside of"),
    "outside at the top": (changed(LAST, 1, ROWS[LAST][1] + HEIGHT), "outside of"),
    "too narrow": (text(1, HEIGHT, ROWS), "outside of 1 x"),
    "overlap": (changed(1, 1, ROWS[1][1] - 1), "on one cell"),
    "all on one place": (text(WIDTH, HEIGHT, [ROWS[0]] * len(ROWS)), "case 0"),
    "a megabyte of digits": (b"1" * (MAXIMUM_OUTPUT_BYTES + 1), "printed more than"),
    "a long number": (b"1" * MAXIMUM_OUTPUT_BYTES, "has 1 numbers"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_rule_costs_the_case_and_is_named(name: str) -> None:
    output, reason = BROKEN[name]
    grade = both(output)
    assert grade.valid
    assert grade.reason.startswith("1 of 2 cases score 0: case 0 (n=")
    assert reason in grade.reason
    assert "\n" not in grade.reason
    assert len(grade.reason) <= 200
    alone = reference(text(*stacked(1)), pieces_of(JUDGE.cases()[1].stdin))
    assert alone is not None
    assert grade.exact == 100 * alone / 2
    assert grade.construction["outputs"][0] is None


@pytest.mark.parametrize(
    ("status", "reason"),
    [
        ("timeout", "ran out of time"),
        ("memory", "needed too much memory"),
        ("crashed", "crashed"),
        ("output_too_large", "printed more than"),
    ],
)
def test_a_run_that_failed_costs_the_case_whatever_it_printed(status: str, reason: str) -> None:
    run = CaseRun(status, text(WIDTH, HEIGHT, ROWS), 2.0)  # type: ignore[arg-type]
    grade = JUDGE.grade_runs([run, ok(text(*stacked(1)))])
    assert grade.valid
    assert reason in grade.reason
    nothing = JUDGE.grade_runs([run, run])
    assert not nothing.valid
    assert nothing.score is None
    assert nothing.construction is None
    assert nothing.reason.startswith("no case is valid: case 0")


def test_coordinates_up_to_the_limit_are_taken() -> None:
    pieces = pieces_of(JUDGE.cases()[0].stdin)
    far = [[x, y + 2_000_000, turns, mirror] for x, y, turns, mirror in ROWS]
    output = text(2_000_000, 4 * 10**12, far)
    assert reference(output, pieces) is not None
    assert both(output).reason == ""
    assert both(text(3_000_000, 4 * 10**12, far)).reason != ""


def test_verify_derives_the_same_from_the_construction_alone() -> None:
    grade = both(b"nonsense")
    again = PolyominoPacking(cases=2, final_cases=2).verify(json.loads(json.dumps(grade.construction)))
    assert (again.valid, again.exact, again.construction) == (True, grade.exact, grade.construction)


def test_verify_knows_the_hidden_set_and_no_other() -> None:
    hidden = JUDGE.final_judge()
    grade = hidden.grade_runs([ok(text(*stacked(case, hidden))) for case in range(2)])
    assert JUDGE.verify(grade.construction).exact == grade.exact
    other = PolyominoPacking(cases=2, seed=77, final_cases=2, final_seed=78).verify(grade.construction)
    assert not other.valid
    assert "other cases" in other.reason


def tampered(output: str | None, **changes: object) -> dict[str, object]:
    construction = both(text(WIDTH, HEIGHT, ROWS)).construction
    return construction | {"outputs": [output, construction["outputs"][1]]} | changes


def test_verify_grades_what_is_stored_and_nothing_else() -> None:
    outputs = [text(1, 1, [[0, 0, 0, 0]]), zlib.compress(text(WIDTH, HEIGHT, ROWS))[:-9], b"\0" * 10]
    for data in (zlib.compress(outputs[0]), *outputs[1:]):
        grade = JUDGE.verify(tampered(base64.b64encode(data).decode()))
        assert grade.reason, data[:20]
        assert grade.exact != both(text(WIDTH, HEIGHT, ROWS)).exact
    assert not JUDGE.verify(tampered("no base64!")).valid
    assert not JUDGE.verify(tampered(None, outputs=[None])).valid
    assert not JUDGE.verify({"cases": "x"}).valid
    assert not JUDGE.verify([1, 2]).valid


def test_a_bomb_in_a_construction_is_not_blown_up() -> None:
    bomb = base64.b64encode(zlib.compress(b" " * (64 << 20))).decode()
    grade = JUDGE.verify(tampered(bomb))
    assert "printed more than" in grade.reason


@pytest.mark.parametrize("changes", [{"cases": 0}, {"final_cases": 0}, {"seed": 2}])
def test_parameters_that_mean_nothing_are_refused(changes: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="cases=" if "seed" not in changes else "must be others"):
        PolyominoPacking(**changes)
