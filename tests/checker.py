"""A second opinion on certificates: recomputes every number of one from its construction alone, with the standard library.

    python tests/checker.py CERTIFICATE.json ...

Written from the definitions and docs/certificate.schema.json; shares no code with the judges, and no method where there is another:
plain integers in base 2^k instead of decimals, each comparison of a packing as a fraction. Exit code 0: everything holds.
"""

import itertools
import json
import math
import sys
from fractions import Fraction

DIRECTIONS = {"circle_packing": "down", "erdos_min_overlap": "up", "first_autocorrelation": "up", "second_autocorrelation": "down"}


class Wrong(Exception):
    """What does not hold."""


def need(holds, what):
    if not holds:
        raise Wrong(what)


def number(text):
    need(isinstance(text, str) and text.lstrip("-").isdecimal() and text.isascii(), f"{text!r:.60} is no decimal integer")
    return int(text)


def products(a, b):
    """All sums of products: entry k is the sum of a[i] * b[k - i]."""
    bits = (max(a) * max(b) * min(len(a), len(b))).bit_length() + 1
    size = -(-bits // 8)
    long_a, long_b = (int.from_bytes(b"".join(x.to_bytes(size, "little") for x in xs), "little") for xs in (a, b))
    text = (long_a * long_b).to_bytes(size * (len(a) + len(b)), "little")
    return [int.from_bytes(text[at : at + size], "little") for at in range(0, size * (len(a) + len(b) - 1), size)]


def packing(construction):
    unit = number(construction["denominator"])
    need(unit > 0, "the denominator is not positive")
    circles = [tuple(Fraction(number(x), unit) for x in circle) for circle in construction["circles"]]
    need(all(len(circle) == 3 for circle in circles), "a circle is not (x, y, r)")
    radii = {(i,): r for i, (_, _, r) in enumerate(circles)}
    walls = {(i,): min(x - r, y - r, 1 - x - r, 1 - y - r) for i, (x, y, r) in enumerate(circles)}
    pairs = {
        (i, j): (x - u) ** 2 + (y - v) ** 2 - (r + s) ** 2
        for i, (x, y, r) in enumerate(circles)
        for j, (u, v, s) in enumerate(circles)
        if i < j
    }
    families = {"radii": (len(circles), radii), "walls": (4 * len(circles), walls), "pairs": (len(pairs), pairs)}
    return sum(r for _, _, r in circles), families, {"circles": len(circles)}


def overlap(construction):
    unit, heights = number(construction["denominator"]), [number(a) for a in construction["heights"]]
    n = len(heights)
    need(unit > 0 and n > 1, "no function")
    need(min(heights) >= 0 and max(heights) <= unit, "a height lies outside [0, 1]")
    sums = products(heights, [unit - a for a in reversed(heights)])  # entry k: shift n - 1 - k
    overlaps = {(n - 1 - k,): Fraction(2 * s, n * unit * unit) for k, s in enumerate(sums)}
    value = max(overlaps.values())
    off = Fraction(2 * sum(heights), n * unit) - 1
    need(off == 0, f"the integral is off by {float(off):.3g}")
    room = {(i,): Fraction(min(a, unit - a), unit) for i, a in enumerate(heights)}
    shifts = {at: value - x for at, x in overlaps.items()}
    return value, {"range": (2 * n, room), "integral": (1, {(): off}), "overlap": (2 * n - 1, shifts)}, {}


def autocorrelation(construction, first):
    heights = [number(a) for a in construction["heights"]]
    need(heights and min(heights) >= 0 and sum(heights) > 0, "heights are negative, or all zero")
    n, c = len(heights), products(heights, heights)
    top = max(c)
    value = Fraction(2 * n * top, sum(heights) ** 2)
    if not first:  # pieces from 0 over c to 0: a piece from a to b has the integral (a + b)/2, and (aa + ab + bb)/3 of its square
        pieces = list(itertools.pairwise([0, *c, 0]))
        squares = sum(a * (a + b) + b * b for a, b in pieces)
        value = Fraction(squares, 3) / (Fraction(sum(a + b for a, b in pieces), 2) * top)
    below = {(k,): Fraction(top - x) for k, x in enumerate(c)}
    given = {(i,): Fraction(a) for i, a in enumerate(heights)}
    mass = {(): Fraction(sum(heights))}
    return value, {"heights": (n, given), "mass": (1, mass), "autoconvolution": (2 * n - 1, below)}, {}


def check(certificate):
    """Raise Wrong unless everything that the certificate says is so."""
    problem, construction, rounding = certificate["problem"], certificate["construction"], certificate["rounding"]
    need(certificate["format"] == "tttd-certificate/1" and certificate["valid"] is True, "another format")
    need(problem in DIRECTIONS, f"problem {problem!r} is not known here")
    need(rounding == DIRECTIONS[problem], f"rounded {rounding}: that is in favour of the construction")
    need(certificate["direction"] == {"down": "maximize", "up": "minimize"}[rounding], "the direction is another")
    keys = {"circles", "denominator"} if problem == "circle_packing" else {"heights", "denominator"}
    need(set(construction) == (keys if problem in ("circle_packing", "erdos_min_overlap") else {"heights"}), "another construction")
    if problem == "circle_packing":
        value, families, parameters = packing(construction)
    elif problem == "erdos_min_overlap":
        value, families, parameters = overlap(construction)
    else:
        value, families, parameters = autocorrelation(construction, problem == "first_autocorrelation")
    for family, (_, slacks) in families.items():
        worst = min(slacks.values(), default=0)
        need(worst >= 0, f"{family}: violated by {float(-worst):.3g}")
    need(certificate["judge"]["parameters"] == parameters, f"the construction is one of {parameters}")
    need(certificate["exact"] == f"{value.numerator}/{value.denominator}", "the exact value is another")
    step = Fraction(1, 10**40)
    low, high = Fraction(certificate["digits"]), Fraction(certificate["score"])
    up = rounding == "up"
    need(0 <= (low - value if up else value - low) < step, "the digits are rounded to another number")
    need(value <= high if up else high <= value, "the score is better than the value")
    nearer = Fraction(math.nextafter(certificate["score"], -math.inf if up else math.inf))
    need(nearer < value if up else value < nearer, "the score is not the nearest double")
    need([c["family"] for c in certificate["checks"]] == list(families), "other families of inequalities were checked")
    for said in certificate["checks"]:
        count, slacks = families[said["family"]]
        tightest = min(slacks.values(), default=None)
        need(said["count"] == count, f"{said['family']}: {count} inequalities, not {said['count']}")
        text = None if tightest is None else f"{tightest.numerator}/{tightest.denominator}"
        need(said["tightest"] == text, f"{said['family']}: the tightest slack is another")
        need(tightest is None or slacks.get(tuple(said["at"])) == tightest, f"{said['family']}: it is not tightest there")


def main(paths):
    failed = not paths
    for path in paths:
        try:
            with open(path, encoding="utf-8") as file:
                check(json.load(file))
            print(f"{path}: holds")
        except (Wrong, OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            failed = True
            print(f"{path}: {error if isinstance(error, Wrong) else f'malformed: {error!r}'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
