"""Nodes and archives for tests of the search, made by hand and drawn at random."""

from __future__ import annotations

from hypothesis import strategies as st

from activities.commit.expand import child_id, expand
from activities.records import ArchiveState, Node


def root(name: str, value: float = 0.0) -> Node:
    return Node(id=name, step=0, value=value, score=value, code="", construction=None)


def child(name: str, parent: Node, value: float) -> Node:
    return Node(
        id=name,
        step=1,
        value=value,
        score=value,
        code=f"code {name}",
        construction=None,
        ancestors=(parent.id, *parent.ancestors),
        ancestor_values=(parent.value, *parent.ancestor_values),
    )


def opened(*seeds: Node) -> ArchiveState:
    return ArchiveState(nodes=seeds, seeds=tuple(seed.id for seed in seeds))


@st.composite
def archives(draw: st.DrawFn) -> ArchiveState:
    """Archives as searches make them: some steps of rollouts from live parents, with failures, ties, top-k and a capacity."""
    values = st.integers(-4, 4).map(lambda i: i / 2)
    archive = opened(*(root(f"s{i}", draw(values)) for i in range(draw(st.integers(1, 4)))))
    top, capacity = draw(st.integers(0, 3)), draw(st.integers(1, 12))
    for step in range(1, draw(st.integers(0, 4)) + 1):
        submissions: list[tuple[Node, Node | None]] = []
        for rollout in range(draw(st.integers(1, 6))):
            parent = archive.nodes[draw(st.integers(0, len(archive.nodes) - 1))]
            valid = draw(st.booleans())
            submissions.append((parent, child(child_id(step, 0, rollout), parent, draw(values)) if valid else None))
        archive = expand(archive, submissions, children_per_parent=top, capacity=capacity)
    return archive
