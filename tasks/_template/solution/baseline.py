"""The simple solver that a claim is measured against: a sequence of linear programs, from grids with noise."""

import time

import numpy as np
from scipy.optimize import linprog

CIRCLES = 26
I, J = np.triu_indices(CIRCLES, 1)
K, EYE = np.arange(len(I)), np.eye(CIRCLES)
PAIRS = np.zeros((len(I), CIRCLES))
PAIRS[K, I] = PAIRS[K, J] = 1


def best_radii(points):
    """The largest sum of radii for these centres."""
    walls = np.minimum(points, 1 - points).min(axis=1)
    gaps = np.linalg.norm(points[I] - points[J], axis=1)
    return linprog(-np.ones(CIRCLES), A_ub=PAIRS, b_ub=gaps, bounds=list(zip(np.zeros(CIRCLES), walls))).x


def moved(points, step):
    """Centres moved by at most `step`, as the constraints' linear part says; unknowns are the moves in x and y, and the radii."""
    between = points[I] - points[J]
    gaps = np.linalg.norm(between, axis=1)
    rows = np.zeros((2, len(I), CIRCLES))
    for axis in (0, 1):
        rows[axis, K, I], rows[axis, K, J] = -between[:, axis] / gaps, between[:, axis] / gaps
    zero = 0 * EYE
    walls = np.block([[-EYE, zero, EYE], [EYE, zero, EYE], [zero, -EYE, EYE], [zero, EYE, EYE]])
    x, y = points.T
    found = linprog(
        np.r_[np.zeros(2 * CIRCLES), -np.ones(CIRCLES)],
        A_ub=np.vstack([np.hstack([*rows, PAIRS]), walls]),
        b_ub=np.concatenate([gaps, x, 1 - x, y, 1 - y]),
        bounds=[(-step, step)] * (2 * CIRCLES) + [(0, 1)] * CIRCLES,
    )
    return np.clip(points + found.x[: 2 * CIRCLES].reshape(2, -1).T, 0, 1)


def run_packing(seed=0, budget_s=10.0):
    until = time.monotonic() + 0.7 * budget_s
    rng = np.random.default_rng(seed)
    grid = np.array([((i + 0.5) / 5, (j + 0.5) / 5) for i in range(5) for j in range(5)] + [(0.4, 0.4)])
    best = grid, best_radii(grid)
    while time.monotonic() < until:
        points = np.clip(grid + rng.normal(0, 0.05, grid.shape), 0.02, 0.98)
        radii, step = best_radii(points), 0.1
        while step > 1e-4 and time.monotonic() < until:
            tried = moved(points, step)
            found = best_radii(tried)
            if found.sum() > radii.sum():
                points, radii = tried, found
            else:
                step /= 2
        if radii.sum() > best[1].sum():
            best = points, radii
    return *best, best[1].sum()
