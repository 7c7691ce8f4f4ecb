"""Writes varied circle-packing programs from a seed: the whole knowledge of the demo's proposer.

A program is drawn as a :class:`Spec` (layout, radius rule, refinement, restarts, mistake) and rendered as text. A training pair
is a parent and a child: the child edits the parent's spec or is drawn afresh. Children never depend on a score, so
pre-training teaches how programs look and not how to improve them. It knows no tokenizer, no model and no prompt.

Programs are bounded by iterations and fixed seeds, never by clocks, so that the same program always gives the same answer.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace

CIRCLES = 26

LAYOUTS = {"grid": 38, "hex": 18, "rings": 14, "random": 30}
RULES = {"fixed": 18, "equal": 40, "nearest": 20, "grow": 14, "solve": 8}
SHAPES = {(5, 5): 30, (5, 6): 30, (6, 5): 15, (4, 7): 8, (6, 6): 9, (7, 4): 8}
REPAIRS = {"none": 45, "solve": 30, "shrink": 25}
ITERATIONS = (1, 2, 3, 4, 5, 8, 10, 15, 20, 40)

REFINED_SHARE = 0.15
"""Of fresh children. Small on purpose: refinement is the improvement that test-time training should find."""

REFINED_SHARE_PARENTS = 0.4
"""Of parents: an archive fills with refined programs, so the model has to know them as parents."""

MISTAKE_SHARE = 0.32
"""Of children, on top of the mistakes that follow from numbers (overlap, 25 points, too few iterations)."""

EDIT_SHARE = 0.6
PLAIN_SHARE = 0.12
"""Of parents: written without functions, like the task's own seed program; never of children (see `child_spec`)."""


@dataclass(frozen=True)
class Spec:
    """Every choice that a program makes."""

    layout: str
    shape: tuple[int, int]
    margin: int
    """Tenths of a cell between the border and the first point."""
    extra: tuple[int, int] | None
    """Cell whose upper corner gets one more point (the 26th of a 5x5 grid)."""
    rings: tuple[tuple[int, int], ...]
    """(points, radius in hundredths) around the middle."""
    jitter: int
    """Standard deviation in hundredths."""
    clip: int
    """Distance from the border in hundredths; 0: the points are not clipped."""
    rule: str
    fixed: int
    """Radius of the rule `fixed`, in thousandths."""
    refined: bool
    iterations: int
    repair: str
    restarts: int
    seed: int
    shrink: int
    """Thousandths taken off every radius; negative would grow them."""
    shuffled: bool
    """Rule `grow` visits the points in a random order."""
    prints: bool
    plain: bool = False
    mistake: str = ""


def _pick(rng: random.Random, weights: dict[str, int]) -> str:
    return rng.choices(list(weights), list(weights.values()))[0]


def _layout_fields(rng: random.Random, layout: str) -> dict[str, object]:
    shape = rng.choices(list(SHAPES), list(SHAPES.values()))[0]
    extra = None
    if shape == (5, 5) and rng.random() < 0.85:
        extra = (rng.randrange(4), rng.randrange(4))
    first = rng.randint(6, 9)
    rings = ((first, rng.randint(18, 28)), (CIRCLES - 1 - first, rng.randint(38, 46)))
    if rng.random() < 0.08:  # forgets the middle point
        rings = (rings[0], (rings[1][0] - 1, rings[1][1]))
    jitter = 0 if rng.random() < 0.3 else rng.randint(1, 4)
    clip = 0 if rng.random() < 0.4 else rng.randint(1, 9)
    return {"layout": layout, "shape": shape, "extra": extra, "rings": rings, "jitter": jitter, "clip": clip}


def _rule_fields(rng: random.Random) -> dict[str, object]:
    shrink = 0 if rng.random() < 0.5 else rng.choice([1, 2, 5, 10, 15, 20, 30, 50])
    return {
        "rule": _pick(rng, RULES),
        "fixed": rng.randint(30, 100) if rng.random() < 0.5 else rng.randint(50, 85),
        "shrink": shrink,
        "shuffled": rng.random() < 0.3,
    }


def _refine_fields(rng: random.Random, share: float) -> dict[str, object]:
    refined = rng.random() < share
    return {"refined": refined, "iterations": rng.choice(ITERATIONS), "repair": _pick(rng, REPAIRS)}


def fresh_spec(rng: random.Random, refined_share: float = REFINED_SHARE) -> Spec:
    """A program from nothing, without a mistake."""
    fields: dict[str, object] = {
        "margin": 5 if rng.random() < 0.85 else rng.choice([3, 4, 6]),
        "restarts": rng.choice([1, 1, 1, 2, 3, 4, 5, 6]),
        "seed": rng.randrange(100),
        "prints": rng.random() < 0.06,
    }
    fields |= _layout_fields(rng, _pick(rng, LAYOUTS)) | _rule_fields(rng) | _refine_fields(rng, refined_share)
    return Spec(**fields)  # type: ignore[arg-type]


def parent_spec(rng: random.Random) -> Spec:
    """What may stand in a prompt: no deliberate mistake, more refinement, sometimes written plainly."""
    spec = fresh_spec(rng, REFINED_SHARE_PARENTS)
    if rng.random() < PLAIN_SHARE:
        extra = (0, 0) if rng.random() < 0.5 else (rng.randrange(4), rng.randrange(4))
        return replace(spec, plain=True, layout="grid", shape=(5, 5), extra=extra, prints=False)
    return spec


def edited_spec(rng: random.Random, spec: Spec) -> Spec:
    """One to three changes of a program."""
    for _ in range(rng.choice([1, 2, 2, 3])):
        kind = rng.choice(["layout", "numbers", "rule", "refine", "iterations", "restarts", "seed", "shrink"])
        if kind == "layout":
            spec = replace(spec, **_layout_fields(rng, _pick(rng, LAYOUTS)))  # type: ignore[arg-type]
        elif kind == "numbers":
            spec = replace(spec, **_layout_fields(rng, spec.layout))  # type: ignore[arg-type]
        elif kind == "rule":
            spec = replace(spec, **_rule_fields(rng))  # type: ignore[arg-type]
        elif kind == "refine":
            # A plain draw, whatever the parent did: an edit is as likely to lose the refinement as chance has it.
            spec = replace(spec, **_refine_fields(rng, 0.2))  # type: ignore[arg-type]
        elif kind == "iterations":
            spec = replace(spec, iterations=rng.choice(ITERATIONS), repair=_pick(rng, REPAIRS))
        elif kind == "restarts":
            spec = replace(spec, restarts=rng.randint(1, 6))
        elif kind == "seed":
            spec = replace(spec, seed=rng.randrange(100))
        else:
            spec = replace(spec, shrink=rng.choice([0, 1, 2, 5, 10, 20]))
    return spec


def child_spec(rng: random.Random, parent: Spec | None) -> Spec:
    """An edit of the parent or a fresh program; in either case sometimes with a mistake.

    A plainly written parent gives its layout to a child with functions: a plain child could only repeat the seed's numbers, and
    a policy that copies a good parent would look like one that learned.
    """
    if parent is None or rng.random() >= EDIT_SHARE:
        spec = fresh_spec(rng)
    elif parent.plain:
        spec = replace(fresh_spec(rng), layout="grid", shape=(5, 5), extra=parent.extra)
    else:
        spec = edited_spec(rng, parent)
    spec = replace(spec, prints=rng.random() < 0.06, seed=rng.randrange(100), mistake="")
    if rng.random() < MISTAKE_SHARE:
        # A mistake that the program has no place for would be none; draw until one changes the text.
        right = render(spec)
        for mistake in rng.sample(list(MISTAKES), len(MISTAKES)):
            wrong = replace(spec, mistake=mistake)
            if render(wrong) != right:
                return wrong
    return spec


MISTAKES: dict[str, tuple[tuple[str, str], ...]] = {
    # name: replacements, the first that fits is made; nearly always they break the program or its answer
    "open bracket": (
        ("radii.sum() > best[1].sum():", "radii.sum() > best[1].sum(:"),
        ("start(rng)\n    radii", "start(rng\n    radii"),
    ),
    "no colon": (("def run_packing():", "def run_packing()"),),
    "bad indent": (
        ("\n    points = start(rng)", "\n  points = start(rng)"),
        ("\n        points = start(rng)", "\n      points = start(rng)"),
    ),
    "no argument": (("= start(rng)", "= start()"),),
    "wrong name": (("radii.sum()\n", "radius.sum()\n"),),
    "wrong module": (("rng.normal(", "np.normal("), ("rng.uniform(", "np.uniform(")),
    "no import": (("from scipy.optimize import minimize\n", ""), ("from scipy.optimize import linprog\n", "")),
    "no return": (("\n    return radii\n", "\n"), ("\n    return np.full(", "\n    np.full(")),
    "two values": (("radii, radii.sum()", "radii.sum()"),),
    "too large": (("    return points, radii, ", "    return points, 1.05 * radii, "),),
    "diameter": (("gaps.min() / 2", "gaps.min()"), ("gaps.min(axis=1) / 2", "gaps.min(axis=1)")),
    "wrong count": (("N = 26\n", "N = 25\n"),),
    "outside": (("\n    return np.clip(points, ", "\n    return np.clip(points, -"),),
}

_GAPS = "    gaps = np.linalg.norm(points[:, None] - points, axis=2) + np.eye(N)\n"
_RULES = {
    "fixed": "def fixed(points):\n    return np.full(N, {fixed})\n",
    "equal": f"def equal(points):\n{_GAPS}    wall = np.minimum(points, 1 - points).min()\n"
    "    return np.full(N, min(wall, gaps.min() / 2))\n",
    "nearest": f"def nearest(points):\n{_GAPS}    wall = np.minimum(points, 1 - points).min(axis=1)\n"
    "    return np.minimum(wall, gaps.min(axis=1) / 2)\n",
    "grow": """def grow(points):
    radii = np.zeros(N)
    wall = np.minimum(points, 1 - points).min(axis=1)
    for i in {order}:
        gaps = np.linalg.norm(points - points[i], axis=1) - radii
        gaps[i] = wall[i]
        radii[i] = gaps.min()
    return radii
""",
    "solve": """def solve(points):
    a, b = np.triu_indices(N, 1)
    pairs = np.eye(N)[a] + np.eye(N)[b]
    gaps = np.linalg.norm(points[a] - points[b], axis=1)
    wall = np.minimum(points, 1 - points).min(axis=1)
    radii = linprog(-np.ones(N), pairs, gaps, bounds=[(0, w) for w in wall]).x
    return radii
""",
}
_REFINE = """def refine(points, radii):
    a, b = np.triu_indices(N, 1)

    def slack(z):
        x, y, r = z.reshape(3, N)
        pairs = np.hypot(x[a] - x[b], y[a] - y[b]) - r[a] - r[b]
        return np.concatenate([pairs, x - r, 1 - x - r, y - r, 1 - y - r])

    z = np.concatenate([points[:, 0], points[:, 1], radii])
    limit = {{"type": "ineq", "fun": slack}}
    found = minimize(lambda z: -z[-N:].sum(), z, method="SLSQP", constraints=limit, options={{"maxiter": {iterations}}})
    x, y, radii = found.x.reshape(3, N)
    return np.column_stack([x, y]), radii
"""
_PLAIN = """import numpy as np


def run_packing():
{comment}    points = [(0.1 + 0.2 * i, 0.1 + 0.2 * j) for i in range(5) for j in range(5)]
    radii = [{radius}] * 25
    points.append(({x}, {y}))
    radii.append(0.1 * (2**0.5 - 1))
    return np.array(points), np.array(radii), sum(radii)
"""
_PLAIN_COMMENT = "    # 25 circles of radius 0.1 on a 5x5 grid, and one in the gap between the first four.\n"


def render(spec: Spec) -> str:
    """The program of a spec."""
    if spec.plain:
        x, y = spec.extra or (0, 0)
        return _PLAIN.format(
            comment=_PLAIN_COMMENT if (x, y) == (0, 0) else "",
            radius="0.1" if spec.shrink <= 1 else f"{0.1 - spec.shrink / 1000:g}",
            x=f"{0.2 * (x + 1):g}",
            y=f"{0.2 * (y + 1):g}",
        )
    solves = spec.rule == "solve" or (spec.refined and spec.repair == "solve")
    head = "import numpy as np\n"
    head += "from scipy.optimize import linprog\n" if solves else ""
    head += "from scipy.optimize import minimize\n" if spec.refined else ""
    parts = [f"{head}\nN = {CIRCLES}\n", _start(spec)]
    rules = [spec.rule] + (["solve"] if solves and spec.rule != "solve" else [])
    order = "np.random.default_rng(0).permutation(N)" if spec.shuffled else "range(N)"
    parts += [_RULES[rule].replace("{fixed}", f"{spec.fixed / 1000:.3f}").replace("{order}", order) for rule in rules]
    if spec.refined:
        parts.append(_REFINE.format(iterations=spec.iterations))
    text = "\n\n".join([*parts, _run(spec)])
    for old, new in MISTAKES.get(spec.mistake, ()):
        if old in text:
            return text.replace(old, new, 1)
    return text


def _start(spec: Spec) -> str:
    lines = ["def start(rng):"]
    if spec.layout == "random":
        lines.append("    points = rng.uniform(0, 1, (N, 2))")
    elif spec.layout == "rings":
        (n1, r1), (n2, r2) = spec.rings
        lines += [
            "    points = [(0.5, 0.5)]",
            f"    for count, size in (({n1}, {r1 / 100:.2f}), ({n2}, {r2 / 100:.2f})):",
            "        for k in range(count):",
            "            angle = 2 * np.pi * k / count",
            "            points.append((0.5 + size * np.cos(angle), 0.5 + size * np.sin(angle)))",
            "    points = np.array(points)",
        ]
    else:
        columns, rows = spec.shape
        point, width = ("i", "columns") if spec.layout == "grid" else ("i + 0.5 * (j % 2)", "columns + 0.5")
        lines += [
            f"    columns, rows = {columns}, {rows}",
            f"    points = [({point}, j) for i in range(columns) for j in range(rows)]",
        ]
        if spec.extra:
            lines.append(f"    points.append(({spec.extra[0]}.5, {spec.extra[1]}.5))")
        lines.append(f"    points = (np.array(points[:N]) + 0.{spec.margin}) / ({width}, rows)")
    if spec.jitter and spec.layout != "random":
        lines.append(f"    points = points + rng.normal(0, 0.0{spec.jitter}, (N, 2))")
    end = f"np.clip(points, 0.0{spec.clip}, 0.{100 - spec.clip})" if spec.clip else "points"
    return "\n".join([*lines, f"    return {end}"]) + "\n"


def _run(spec: Spec) -> str:
    once = spec.restarts == 1
    body = [
        f"rng = np.random.default_rng({spec.seed}{'' if once else ' + seed'})",
        "points = start(rng)",
        f"radii = {spec.rule}(points)",
    ]
    factor = f"{1 - spec.shrink / 1000:.3f} * " if spec.shrink else ""
    if spec.refined:
        body.append("points, radii = refine(points, radii)")
        if spec.repair == "solve":
            body.append("radii = solve(points)")
        if spec.repair == "shrink" and not factor:
            factor = "0.999 * "
    if once:
        lines = [f"    {line}" for line in body]
    else:
        lines = ["    best = None", f"    for seed in range({spec.restarts}):"]
        lines += [f"        {line}" for line in body]
        lines += [
            "        if best is None or radii.sum() > best[1].sum():",
            "            best = points, radii",
            "    points, radii = best",
        ]
    if spec.prints:
        lines.append('    print("sum", radii.sum())')
    return "\n".join(["def run_packing():", *lines, f"    return points, {factor}radii, radii.sum()"]) + "\n"
