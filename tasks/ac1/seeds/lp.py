import time

import numpy as np
from scipy.optimize import linprog


def best_companion(f):
    # The g >= 0 with the largest sum for which no value of f*g exceeds the largest of f*f.
    n = len(f)
    rows = np.zeros((2 * n - 1, n))
    for j in range(n):
        rows[j : j + n, j] = f
    limit = np.full(2 * n - 1, np.convolve(f, f).max())
    result = linprog(-np.ones(n), A_ub=rows, b_ub=limit, bounds=(0, None), method="highs")
    return result.x if result.success else None


def propose_candidate(seed=42, budget_s=1000):
    end = time.monotonic() + min(0.8 * budget_s, 60)
    rng = np.random.default_rng(seed)
    f = rng.uniform(0.5, 1.5, 80)
    best, share = f, 0.1
    while time.monotonic() < end and share > 1e-4:
        g = best_companion(f)
        if g is None:
            break
        # Move a little towards g, as far as that helps.
        g *= f.sum() / g.sum()
        tried = (1 - share) * f + share * g
        if evaluate_sequence(tried) < evaluate_sequence(f):
            f = tried
            share = min(0.3, 1.2 * share)
        else:
            share /= 2
        if evaluate_sequence(f) < evaluate_sequence(best):
            best = f
    print("value", evaluate_sequence(best))
    return best.tolist()
