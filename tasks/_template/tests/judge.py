"""The judge: from what a program returned to its score. Change it to your problem; any Python will do.

`result` is what the program returned, already decoded: numbers in lists, finite, and nothing else. The rest is up to you:
- return the score; a Fraction keeps more digits than a float, and is rounded against the program;
- or return (score, construction), if what is to be stored differs from what the program returned;
- raise ValueError("why") if it is no answer: the program gets reward 0, and the reason may be shown to the model.
Anything that a program says about itself is a claim: compute the score from the data alone. A score must not be negative.
Files beside this one belong to the judge: `from .other import something`.
"""

from fractions import Fraction
from math import floor, isqrt

CIRCLES = 26
DIGITS = 10**40


def score(result):
    """Sum of the radii after all of them are scaled down together until every circle fits; exact, rounded down."""
    try:
        centers, radii, *_ = result
        circles = [(Fraction(x), Fraction(y), Fraction(r)) for (x, y), r in zip(centers, radii, strict=True)]
    except TypeError:
        raise ValueError("the result must be (centers, radii, total): pairs (x, y), one radius for each, and a number") from None
    if len(circles) != CIRCLES:
        raise ValueError(f"{len(circles)} circles; there must be {CIRCLES}")
    scale = Fraction(1)
    for i, (x, y, r) in enumerate(circles):
        to_wall = min(x, y, 1 - x, 1 - y)
        if to_wall < 0 or r < 0:
            raise ValueError(f"circle {i} has a negative radius, or its centre lies outside the square")
        if r > 0:
            scale = min(scale, to_wall / r)
        for u, v, s in circles[:i]:
            if r + s > 0:
                scale = min(scale, root((x - u) ** 2 + (y - v) ** 2) / (r + s))
    return rounded_down(scale * sum(r for _, _, r in circles))


def root(square):
    """Square root of a Fraction, rounded down."""
    return Fraction(isqrt(floor(square * DIGITS**2)), DIGITS)


def rounded_down(number):
    return Fraction(floor(number * DIGITS), DIGITS)
