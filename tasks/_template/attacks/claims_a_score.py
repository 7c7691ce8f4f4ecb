"""A program that lies: its circles are tiny, and its total is a claim that the judge must ignore."""


def run_packing():
    centers = [(0.1 + 0.15 * i, 0.1 + 0.15 * j) for i in range(5) for j in range(5)] + [(0.95, 0.95)]
    return centers, [0.01] * 26, 1e9
