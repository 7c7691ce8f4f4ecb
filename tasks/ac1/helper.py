"""Lets a program score itself. A copy of the judge's rules in floating point: the judge never reads what it computes."""


def evaluate_sequence(sequence: object) -> float:
    """2n max(f*f) / (sum f)^2 of the heights, shape (n,); infinity for heights that the judge would not take."""
    import numpy as np

    try:
        f = np.asarray(sequence, dtype=np.float64)
    except (TypeError, ValueError):
        return float("inf")
    if f.ndim != 1 or not 1 <= len(f) <= 100_000 or not ((f >= 0).all() and (f <= 1e6).all() and f.any()):
        return float("inf")
    n, f = len(f), f / f.max()
    if n <= 2000:
        largest = np.convolve(f, f).max()
    else:
        size = 1 << (2 * n - 1).bit_length()
        largest = np.fft.irfft(np.fft.rfft(f, size) ** 2, size).max()
    return float(2 * n * largest / f.sum() ** 2)
