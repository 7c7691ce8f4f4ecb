"""What one grid of verdicts does to the archive. Source: spec algorithm 1.4 and 1.5. Pure: same inputs, same archive."""

from __future__ import annotations

from collections.abc import Iterable

from activities.records import ArchiveState, BatchRow, Node, StepPlan


def node_key(node: Node) -> str | None:
    """What makes two nodes the same answer: the construction, else the code; None for a seed without either."""
    return node.construction or node.code or None


def child_id(step: int, group: int, rollout: int) -> str:
    """Unique in a run and readable: where the node was made."""
    return f"s{step:06d}-g{group:02d}-r{rollout:02d}"


def make_child(row: BatchRow, parent: Node, code: str, output_tail: str) -> Node:
    """The node of a valid rollout; ancestors are copied onto it, so that they outlive the parent's eviction."""
    assert row.value is not None
    return Node(
        id=child_id(row.at.step, row.at.group, row.at.rollout),
        step=row.at.step,
        value=row.value,
        score=row.score,
        code=code,
        construction=row.construction,
        output_tail=output_tail,
        ancestors=(parent.id, *parent.ancestors),
        ancestor_values=(parent.value, *parent.ancestor_values),
        ancestor_scores=(parent.score, *parent.ancestor_scores),
    )


def expand(
    archive: ArchiveState, submissions: Iterable[tuple[Node, Node | None]], *, children_per_parent: int, capacity: int
) -> ArchiveState:
    """Apply a whole step.

    Args:
        submissions: (parent, child) of every rollout in coordinate order; child None for a failure, which only counts a visit.
        children_per_parent: best children kept per parent, over all steps; 0 keeps all.
        capacity: nodes kept; seeds are kept beyond it.
    """
    visits = dict(archive.visits)
    best_child = dict(archive.best_child)
    total = archive.total_visits
    live = list(archive.nodes)
    keys = {key for node in live if (key := node_key(node)) is not None}
    for parent, child in submissions:
        total += 1
        for node_id in (parent.id, *parent.ancestors):
            visits[node_id] = visits.get(node_id, 0) + 1
        if child is None:
            continue
        # Counted even when the child is dropped as a duplicate: m is the best value ever submitted.
        best_child[parent.id] = max(best_child.get(parent.id, child.value), child.value)
        key = node_key(child)
        if key not in keys:
            live.append(child)
            if key is not None:
                keys.add(key)
    kept = _cap(_top_children(live, children_per_parent), set(archive.seeds), capacity)
    return ArchiveState(nodes=tuple(kept), seeds=archive.seeds, visits=visits, best_child=best_child, total_visits=total)


def _top_children(nodes: list[Node], keep: int) -> list[Node]:
    """Per immediate parent the best `keep` children, ties by arrival; parentless nodes first, then groups by first appearance."""
    if keep == 0:
        return nodes
    roots = [node for node in nodes if not node.ancestors]
    families: dict[str, list[Node]] = {}
    for node in nodes:
        if node.ancestors:
            families.setdefault(node.ancestors[0], []).append(node)
    return roots + [node for family in families.values() for node in sorted(family, key=lambda n: -n.value)[:keep]]


def _cap(nodes: list[Node], seeds: set[str], capacity: int) -> list[Node]:
    """Keep seeds and the highest values; survivors keep their order, ties at the cut go to the later node."""
    if len(nodes) <= capacity:
        return nodes
    places = max(0, capacity - sum(node.id in seeds for node in nodes))
    # Later of equals, as the target has it: an earlier node of that value has had its turn.
    others = sorted((node for node in reversed(nodes) if node.id not in seeds), key=lambda n: n.value, reverse=True)
    kept = seeds | {node.id for node in others[:places]}
    return [node for node in nodes if node.id in kept]


def best_node(archive: ArchiveState) -> Node | None:
    """The best certified answer, derived from the archive and stored nowhere else; the earliest of equals."""
    return max((n for n in archive.nodes if n.score is not None), key=lambda n: n.value, default=None)


def parents_of(plan: StepPlan) -> dict[int, Node]:
    """Parent node by group."""
    return {group.group: group.parent for group in plan.groups}
