"""Sequential linear programming for the first autocorrelation inequality: the simple solver that every claim is measured against.

The autoconvolution is linearised in the heights, a linear program finds the best step inside a trust region, and a step that
helps is taken.
"""

import time

BEGAN = time.monotonic()  # the imports count too

import numpy as np
from scipy.optimize import linprog

POINTS = 100
LONGEST = 1500  # of a parent: linear programs beyond that do not fit into the time and memory of a run
SPARE = 0.9  # of the budget; a linear program that is under way is cut off there


def value(a):
    return 2 * len(a) * np.convolve(a, a).max() / a.sum() ** 2


def shifted(a):
    """Row k holds a[k - j] for every j: times d it is the convolution of a and d. Shape (2n-1, n)."""
    n = len(a)
    return np.lib.stride_tricks.sliding_window_view(np.pad(a, n - 1), n)[:, ::-1]


def step(a, radius, seconds):
    """The best change of the heights within the radius, by the linear model; None if the solver had no time."""
    n, found = len(a), np.convolve(a, a)
    near = found > found.max() - 2 * radius * a.sum()  # the others cannot become the largest
    rows = np.column_stack([2 * shifted(a)[near], -np.ones(near.sum())])
    bounds = [*zip(np.maximum(-radius, -a), np.full(n, radius)), (None, None)]
    mass = np.r_[np.ones(n), 0.0][None]
    cost = np.r_[np.zeros(n), 1.0]
    result = linprog(cost, rows, -found[near], mass, [0.0], bounds, "highs-ds", options={"time_limit": seconds})
    return None if result.x is None else result.x[:n]


def improve(a, radius, until):
    """Take steps until none helps any more, or time is up."""
    best = value(a)
    while radius > 1e-9 and time.monotonic() < until:
        change = step(a, radius, max(0.1, until - time.monotonic()))
        if change is None:
            break
        tried = np.maximum(a + change, 0)
        if (found := value(tried)) < best:
            a, best, radius = tried * len(a) / tried.sum(), found, min(0.5, 1.5 * radius)
        else:
            radius *= 0.4
    return a


def propose_candidate(seed=0, budget_s=60.0):
    until = BEGAN + SPARE * budget_s
    rng = np.random.default_rng(seed)
    parent = globals().get("height_sequence_1")
    if parent is not None and np.ptp(parent) == 0:
        parent = None  # a constant is no beginning: every direction is as good as another
    if parent is not None and len(parent) > LONGEST:
        print(f"the parent has {len(parent)} heights; this solver takes at most {LONGEST} and returns it as it is")
        return parent
    best = None if parent is None else improve(parent * len(parent) / parent.sum(), 1e-2, until)
    while best is None or time.monotonic() < until:
        n = POINTS if parent is None else len(parent)
        start = rng.uniform(0.5, 1.5, n) if parent is None else best * rng.uniform(0.95, 1.05, n)
        found = improve(start * n / start.sum(), 0.1, until)
        if best is None or value(found) < value(best):
            best = found
            print("value", value(best))
    return best
