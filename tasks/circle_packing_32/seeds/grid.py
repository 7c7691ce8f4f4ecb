import numpy as np


def run_packing():
    # 25 circles of radius 0.1 on a 5x5 grid, and seven in gaps between four of them.
    points = [(0.1 + 0.2 * i, 0.1 + 0.2 * j) for i in range(5) for j in range(5)]
    radii = [0.1] * 25
    gaps = [(0.2 + 0.2 * i, 0.2 + 0.2 * j) for i in range(4) for j in range(4)]
    points += gaps[:7]
    radii += [0.1 * (2**0.5 - 1)] * 7
    return np.array(points), np.array(radii), sum(radii)
