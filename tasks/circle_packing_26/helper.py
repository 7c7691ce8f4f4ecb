"""Lets a program score itself. A copy of the judge's rules in floating point: the judge never reads what it computes."""

_CIRCLES = 26


def evaluate_packing(centers: object, radii: object = None, total: object = None) -> float:
    """Sum of the radii after the judge's repair, or minus infinity for what it would not take.

    Takes what `run_packing` returns, as one tuple or as its parts; the total is ignored. Centers have shape (n, 2), radii (n,).
    """
    if radii is None:
        centers, radii = centers[:2]  # type: ignore[index]
    try:
        circles = [(float(x), float(y), float(r)) for (x, y), r in zip(centers, radii, strict=True)]  # type: ignore[call-overload]
    except (TypeError, ValueError):
        return float("-inf")
    if len(circles) != _CIRCLES or not all(0 <= x <= 1 and 0 <= y <= 1 and 0 <= r <= 1 for x, y, r in circles):
        return float("-inf")
    worst = _worst_violation(circles)
    if worst > 1e-6:
        return float("-inf")
    if worst > 0:
        shrunk = [(x, y, max(0.0, r - worst)) for x, y, r in circles]
        # A circle that stops at radius 0 no longer gives its half; the others then give twice.
        if any(r == 0 for _, _, r in shrunk) and _worst_violation(shrunk) > 1e-15:
            shrunk = [(x, y, max(0.0, r - 2 * worst)) for x, y, r in circles]
        circles = shrunk
    return sum(r for _, _, r in circles)


def _worst_violation(circles: list[tuple[float, float, float]]) -> float:
    """By how much all radii must shrink: a boundary's whole excess, half the overlap of a pair."""
    worst = max(max(r - x, r - y, x + r - 1, y + r - 1) for x, y, r in circles)
    for i, (x, y, r) in enumerate(circles):
        for u, v, s in circles[i + 1 :]:
            worst = max(worst, (r + s - ((x - u) ** 2 + (y - v) ** 2) ** 0.5) / 2)
    return worst
