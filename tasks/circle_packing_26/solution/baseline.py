"""SLSQP from many starts for circles in the unit square: the simple solver that every claim is measured against.

Centers and radii move together; constraints and their derivatives are exact. The starts are fixed by the seed.
"""

import time

BEGAN = time.monotonic()  # the imports count too

import numpy as np
from scipy.optimize import linprog, minimize

CIRCLES = 26
SPARE = 0.85  # of the budget; one descent is cut off there
I, J = np.triu_indices(CIRCLES, 1)
PAIRS, WALLS = np.arange(len(I)), np.eye(CIRCLES)


class OutOfTime(Exception):
    pass


def slack(v):
    """What must not be negative: squared gaps of pairs, then the distances to the four walls. v = (x, y, r), shape (3n,)."""
    x, y, r = v.reshape(3, -1)
    pairs = (x[I] - x[J]) ** 2 + (y[I] - y[J]) ** 2 - (r[I] + r[J]) ** 2
    return np.concatenate([pairs, x - r, 1 - x - r, y - r, 1 - y - r])


def slack_derivative(v):
    x, y, r = v.reshape(3, -1)
    rows = np.zeros((3, len(I), CIRCLES))
    for k, (first, second) in enumerate([(x[I] - x[J], x[J] - x[I]), (y[I] - y[J], y[J] - y[I]), (-r[I] - r[J],) * 2]):
        rows[k, PAIRS, I], rows[k, PAIRS, J] = 2 * first, 2 * second
    zero = 0 * WALLS
    walls = [[WALLS, zero, -WALLS], [-WALLS, zero, -WALLS], [zero, WALLS, -WALLS], [zero, -WALLS, -WALLS]]
    return np.vstack([np.hstack(list(rows)), np.block(walls)])


def valid(v):
    """The same centers with radii that fit: those given, or by linear program the largest, shrunk by their worst violation."""
    x, y, r = np.clip(v.reshape(3, -1), 0, 1)
    walls = np.minimum(np.minimum(x, 1 - x), np.minimum(y, 1 - y))
    gaps = np.hypot(x[I] - x[J], y[I] - y[J])
    rows = np.zeros((len(I), CIRCLES))
    rows[PAIRS, I] = rows[PAIRS, J] = 1
    largest = linprog(-np.ones(CIRCLES), rows, gaps, bounds=[*zip(np.zeros(CIRCLES), walls)]).x
    fitting = [c - max(0, ((c[I] + c[J] - gaps) / 2).max(), (c - walls).max()) for c in (r, r if largest is None else largest)]
    return np.concatenate([x, y, max((np.maximum(0, c) for c in fitting), key=np.sum)])


def total(v):
    return v[2 * CIRCLES :].sum()


def descend(start, until):
    """A local optimum near the start, or how far it got in time; the start itself if nothing came of it."""
    last = [start]

    def watch(v):
        last[0] = v
        if time.monotonic() > until:
            raise OutOfTime

    cost = np.r_[np.zeros(2 * CIRCLES), -np.ones(CIRCLES)]
    constraints = {"type": "ineq", "fun": slack, "jac": slack_derivative}
    bounds = [(0, 1)] * len(start)
    solver = {"method": "SLSQP", "jac": lambda v: cost, "callback": watch, "options": {"maxiter": 400, "ftol": 1e-13}}
    try:
        last[0] = minimize(cost.dot, start, bounds=bounds, constraints=constraints, **solver).x
    except OutOfTime:
        pass
    return max(valid(start), valid(last[0]), key=total)


def starts(rng, parent):
    """The parent and its neighbourhood if there is one, else grids with noise and radii that fit."""
    if parent is not None:
        yield parent
        while True:
            yield np.clip(parent + rng.normal(0, 10 ** rng.uniform(-3, -1), parent.shape), 0, 1)
    while True:
        columns = int(rng.integers(4, 8))
        rows = -(-CIRCLES // columns)
        places = [((i + 0.5 + 0.5 * (j % 2)) % columns / columns, (j + 0.5) / rows) for j in range(rows) for i in range(columns)]
        points = np.array(places)[rng.permutation(len(places))[:CIRCLES]] + rng.normal(0, 0.03, (CIRCLES, 2))
        start = valid(np.concatenate([*np.clip(points, 0.02, 0.98).T, np.zeros(CIRCLES)]))
        start[2 * CIRCLES :] *= 0.9
        yield start


def run_packing(seed=0, budget_s=60.0):
    until = BEGAN + SPARE * budget_s
    parent = globals().get("parent_circles")
    best = None if parent is None else valid(parent.T.ravel())
    for start in starts(np.random.default_rng(seed), best):
        if best is not None and time.monotonic() > until:
            break
        found = descend(start, until)
        if best is None or total(found) > total(best):
            best = found
            print("sum of radii", total(best))
    x, y, r = best.reshape(3, -1)
    return np.column_stack([x, y]), r, r.sum()
