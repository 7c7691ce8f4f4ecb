"""Sequential linear programming for Erdős' minimum overlap: the simple solver that every claim is measured against.

The overlaps are linearised in h, a linear program finds the best step inside a trust region, and a step that helps is taken.
"""

import time

BEGAN = time.monotonic()  # the imports count too

import numpy as np
from scipy.optimize import linprog

POINTS = 60
LONGEST = 1500  # of a parent: linear programs beyond that do not fit into the time and memory of a run
SPARE = 0.9  # of the budget; a linear program that is under way is cut off there


def overlaps(h):
    return np.correlate(1 - h, h, "full")  # shifts -(n-1) .. n-1


def gradients(h):
    """Row k: derivative of the overlap at shift k with respect to each height, shape (2n-1, n)."""
    n = len(h)
    windows = np.lib.stride_tricks.sliding_window_view
    outside = windows(np.pad(1 - h, n - 1), n)
    return outside - windows(np.pad(h, n - 1), n)[::-1]


def step(h, radius, seconds):
    """The best change of h within the radius, by the linear model; None if the solver had no time."""
    n, found = len(h), overlaps(h)
    near = found > found.max() - n * radius  # a far shift cannot become the largest
    rows = np.column_stack([gradients(h)[near], -np.ones(near.sum())])
    bounds = [*zip(np.maximum(-radius, -h), np.minimum(radius, 1 - h)), (None, None)]
    mass = np.r_[np.ones(n), 0.0][None]
    cost = np.r_[np.zeros(n), 1.0]
    result = linprog(cost, rows, -found[near], mass, [n / 2 - h.sum()], bounds, "highs-ds", options={"time_limit": seconds})
    return None if result.x is None else result.x[:n]


def improve(h, radius, until):
    """Take steps until none helps any more, or time is up."""
    best = overlaps(h).max() if abs(h.sum() - len(h) / 2) < 1e-9 else np.inf  # the first step mends the integral
    while radius > 1e-9 and time.monotonic() < until:
        change = step(h, radius, max(0.1, until - time.monotonic()))
        if change is None:
            break
        tried = np.clip(h + change, 0, 1)
        tried += (len(h) / 2 - tried.sum()) / len(h) * ((tried > 0) & (tried < 1))
        if (value := overlaps(np.clip(tried, 0, 1)).max()) < best:
            h, best, radius = np.clip(tried, 0, 1), value, min(0.2, 1.5 * radius)
        else:
            radius *= 0.4
    return h


def run(seed=0, budget_s=60.0):
    until = BEGAN + SPARE * budget_s
    rng = np.random.default_rng(seed)
    parent = globals().get("initial_h_values")
    if parent is not None and len(parent) > LONGEST:
        print(f"the parent has {len(parent)} heights; this solver takes at most {LONGEST} and returns it as it is")
        return parent
    best = improve(np.clip(parent, 0, 1), 1e-3, until) if parent is not None else None
    while best is None or time.monotonic() < until:
        n = POINTS if parent is None else len(parent)
        start = rng.uniform(0.1, 0.9, n) if parent is None else np.clip(best + 0.02 * rng.standard_normal(n), 0, 1)
        h = improve(np.clip(start + 0.5 - start.mean(), 0, 1), 0.05, until)
        if best is None or overlaps(h).max() / len(h) < overlaps(best).max() / len(best):
            best = h
            print("C5", overlaps(h).max() * 2 / len(h))
    return best, overlaps(best).max() * 2 / len(best), len(best)
