"""Lets a program score itself. A copy of the judge's rules in floating point: the judge never reads what it computes."""


def verify_c5_solution(h_values: object, c5_bound: object = None, n_points: object = None) -> float:
    """C5 of the heights, shape (n,), as the judge repairs and scores them. Bound and point count are ignored.

    Raises:
        ValueError: the judge would not take them; says why.
    """
    import numpy as np

    h = np.asarray(h_values, dtype=np.float64)
    if h.ndim != 1 or not 2 <= len(h) <= 20_000:
        raise ValueError(f"h has shape {h.shape}; it must be one list of 2 to 20000 heights")
    if not (np.isfinite(h).all() and h.min() >= -1e-6 and h.max() <= 1 + 1e-6):
        raise ValueError("heights must lie in [0, 1]")
    h = np.clip(h, 0.0, 1.0)
    n, total = len(h), float(h.sum())
    if abs(2 * total / n - 1) > 1e-3:
        raise ValueError(f"the heights sum to {total:.9g}, not n/2 = {n / 2:g}")
    for _ in range(n):  # equal shares for all heights that have room; a few rounds are enough
        surplus = float(h.sum()) - n / 2
        room = h > 0 if surplus > 0 else h < 1
        if abs(surplus) <= 1e-15 * n or not room.any():
            break
        h[room] = np.clip(h[room] - surplus / room.sum(), 0.0, 1.0)
    if n <= 2000:
        return float(np.correlate(h, 1 - h, "full").max() * 2 / n)
    size = 1 << (2 * n - 1).bit_length()
    overlaps = np.fft.irfft(np.fft.rfft(h, size) * np.fft.rfft((1 - h)[::-1], size), size)
    return float(overlaps.max() * 2 / n)


def evaluate_erdos_solution(h_values: object, c5_bound: object = None, n_points: object = None) -> float:
    """As `verify_c5_solution`, with infinity for heights that the judge would not take."""
    try:
        return verify_c5_solution(h_values)
    except (TypeError, ValueError):
        return float("inf")
