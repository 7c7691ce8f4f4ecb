"""Lets a program score itself. A copy of the judge's rules in floating point: the judge never reads what it computes."""


def evaluate_sequence(sequence: object) -> float:
    """The ratio of the heights, shape (n,); minus infinity for heights that the judge would not take."""
    import numpy as np

    try:
        f = np.asarray(sequence, dtype=np.float64)
    except (TypeError, ValueError):
        return float("-inf")
    if f.ndim != 1 or not 1 <= len(f) <= 100_000 or not ((f >= 0).all() and (f <= 1e6).all() and f.any()):
        return float("-inf")
    n, f = len(f), f / f.max()
    if n <= 2000:
        c = np.convolve(f, f)
    else:
        size = 1 << (2 * n - 1).bit_length()
        c = np.maximum(np.fft.irfft(np.fft.rfft(f, size) ** 2, size)[: 2 * n - 1], 0.0)
    return float((2 * np.dot(c, c) + np.dot(c[:-1], c[1:])) / (3 * c.sum() * c.max()))
