import math


def run_packing():
    # One circle in the middle, a ring of 8 around it, a ring of 16 around that, and one in the corner; 26 in all.
    points = [(0.5, 0.5)]
    for count, distance in ((8, 0.3), (16, 0.7)):
        angles = [2 * math.pi * k / count for k in range(count)]
        points += [(0.5 + distance * math.cos(a), 0.5 + distance * math.sin(a)) for a in angles]
    points.append((0.0, 0.0))
    # The outer ring leaves the square: it is moved to the border.
    points = [(min(0.99, max(0.01, x)), min(0.99, max(0.01, y))) for x, y in points]
    # Each radius first reaches the border; then every overlapping pair shrinks in proportion.
    radii = [min(x, y, 1 - x, 1 - y) for x, y in points]
    for i, p in enumerate(points):
        for j in range(i + 1, len(points)):
            distance = math.dist(p, points[j])
            if radii[i] + radii[j] > distance:
                scale = distance / (radii[i] + radii[j])
                radii[i] *= scale
                radii[j] *= scale
    return points, radii, sum(radii)
