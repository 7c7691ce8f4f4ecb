import numpy as np


def run_packing():
    points = [(0.1 + 0.2 * i, 0.1 + 0.2 * j) for i in range(5) for j in range(5)]
    radii = [0.07] * 25
    points.append((0.8, 0.2))
    radii.append(0.1 * (2**0.5 - 1))
    return np.array(points), np.array(radii), sum(radii)
