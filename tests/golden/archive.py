"""Replays recorded archive operations on `expand` and `select_parents`. Source: spec algorithm 1 and 10.

`rollout` operations are collected and applied as one grid at `flush`, as a commit does; a `select` before the flush sees them
without top-k and capacity, which is what the reference's live archive shows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from activities.commit.expand import expand
from activities.errors import InputError
from activities.records import ArchiveState, Node
from activities.select.puct import Selection, score_nodes, select_parents
from tests.golden.outcome import Case, number

TARGETS = {"original_stable": 1, "original_G64": 64}
"""Implementation tag -> visit unit G."""

UNLIMITED = 1 << 60


def node_of(record: dict[str, Any], step: int, parent: Node | None = None) -> Node:
    """A golden node: its key stands for the code, so that equal keys are duplicates."""
    value = number(record["value"])
    return Node(
        id=record["id"],
        step=step,
        value=value,
        score=value,
        code=record.get("key") or "",
        construction=None,
        ancestors=() if parent is None else (parent.id, *parent.ancestors),
        ancestor_values=() if parent is None else (parent.value, *parent.ancestor_values),
    )


@dataclass
class Replay:
    """One archive under replay."""

    case: Case
    archive: ArchiveState
    exploration: float
    visit_unit: int
    children_per_parent: int
    capacity: int
    nodes: dict[str, Node] = field(default_factory=dict)
    """Every node ever made: a rollout may start from one that has been evicted."""
    pending: list[tuple[Node, Node | None]] = field(default_factory=list)
    null_visits: dict[str, int] = field(default_factory=dict)
    """Visits by node id that the reference did not count, because the child had no value."""
    nulls: int = 0
    step: int = 0

    @classmethod
    def open(cls, case: Case, seeds: Iterable[dict[str, Any]], config: dict[str, Any], visit_unit: int) -> Replay:
        nodes = tuple(node_of(seed, 0) for seed in seeds)
        archive = ArchiveState(nodes=nodes, seeds=tuple(n.id for n in nodes))
        return cls(case, archive, config["c"], visit_unit, config["topk"], config["cap"], nodes={node.id: node for node in nodes})

    def rollout(self, parent_id: str, child: dict[str, Any] | None) -> None:
        parent = self.nodes[parent_id]
        node: Node | None = None
        if child is not None and child["value"] is None:
            self.nulls += 1
            for name in (parent.id, *parent.ancestors):
                self.null_visits[name] = self.null_visits.get(name, 0) + 1
        elif child is not None:
            node = self.nodes[child["id"]] = node_of(child, self.step, parent)
        self.pending.append((parent, node))

    def flush(self) -> None:
        self.archive = self._expanded(self.children_per_parent, self.capacity)
        self.pending = []
        self.step += 1

    def select(self, count: int) -> Selection:
        archive = self._expanded(0, UNLIMITED)
        return select_parents(archive, count, exploration=self.exploration, visit_unit=self.visit_unit)

    def _expanded(self, children_per_parent: int, capacity: int) -> ArchiveState:
        return expand(self.archive, self.pending, children_per_parent=children_per_parent, capacity=capacity)


def compare_selection(replay: Replay, where: str, count: int, scale: Any, picks: list[dict[str, Any]]) -> list[str]:
    """Check a recorded selection, parts of every score included. Returns our picks."""
    case = replay.case
    try:
        selection = replay.select(count)
    except InputError as error:
        case.differ(where, str(error), "empty_archive" if not replay.archive.nodes and not replay.pending else "")
        return []
    if replay.nulls:
        _select_beside_null_visits(replay, where, selection, picks)
        return [parent.node.id for parent in selection.parents]
    case.near(f"{where} scale", selection.scale, scale)
    if len(picks) < count:
        case.same(f"{where} number of parents", len(selection.parents), count)
        case.differ(where, f"{count - len(picks)} parents filled up", "short_batch" if selection.note else "")
    for i, (found, expected) in enumerate(zip(selection.parents, picks, strict=False)):
        spot = f"{where} pick {i}"
        if not case.same(f"{spot} id", found.node.id, expected["id"]):
            continue
        case.same(f"{spot} n", found.visits, expected["n"])
        for name, part in (("Q", found.q), ("P", found.prior), ("bonus", found.bonus), ("score", found.score)):
            case.near(f"{spot} {name}", part, expected[name])
    return [parent.node.id for parent in selection.parents]


def _select_beside_null_visits(replay: Replay, where: str, selection: Selection, picks: list[dict[str, Any]]) -> None:
    """Our n and T hold visits that the reference ignored, so bonus and score are not its; visits, Q and P are still checked."""
    replay.case.differ(where, f"{replay.nulls} visits of children without a value", "null_value")
    for i, (found, expected) in enumerate(zip(selection.parents, picks, strict=False)):
        if found.node.id == expected["id"]:
            extra = replay.null_visits.get(found.node.id, 0)
            replay.case.same(f"{where} pick {i} n", found.visits, expected["n"] + extra)
            replay.case.near(f"{where} pick {i} P", found.prior, expected["P"])


def compare_state(replay: Replay, where: str, expected: dict[str, Any]) -> None:
    """Check order, visits, best children and lineages after a flush, exactly."""
    case, archive = replay.case, replay.archive
    case.same(f"{where} order", [node.id for node in archive.nodes], expected["order"])
    visits = {k: archive.visits[k] - replay.null_visits.get(k, 0) for k in archive.visits}
    case.same(f"{where} n", {k: v for k, v in visits.items() if v}, expected["n"])
    case.same(f"{where} m", archive.best_child, {k: number(v) for k, v in expected["m"].items()})
    case.same(f"{where} T", archive.total_visits - replay.nulls, expected["T"])
    if replay.nulls:
        case.differ(where, f"{replay.nulls} visits of children without a value", "null_value")
    for node in archive.nodes:
        if "parents" in expected and node.id in expected["parents"]:
            case.same(f"{where} ancestors of {node.id}", list(node.ancestors), expected["parents"][node.id])
            values = [number(v) for v in expected["parent_values"][node.id]]
            case.same(f"{where} ancestor values of {node.id}", list(node.ancestor_values), values)


def replay_scenario(scenario: dict[str, Any]) -> Case:
    """One hand-made scenario under every target implementation that the file has for it."""
    case = Case(scenario["name"])
    for tag, visit_unit in TARGETS.items():
        if tag in scenario["results"]:
            replay = Replay.open(case, scenario["seeds"], scenario["config"], visit_unit)
            trace = {entry["after_op"]: entry for entry in scenario["results"][tag]["trace"]}
            for index, operation in enumerate(scenario["ops"]):
                _replay_operation(replay, f"{tag} op {index}", operation, trace.get(index))
    return case


def _replay_operation(replay: Replay, where: str, operation: dict[str, Any], expected: dict[str, Any] | None) -> None:
    match operation["op"]:
        case "rollout":
            replay.rollout(operation["parent"], operation["child"])
        case "flush":
            replay.flush()
            if expected is not None:
                compare_state(replay, where, expected["flush"])
        case "select":
            if expected is not None:
                compare_selection(replay, where, operation["num"], expected["scale"], expected["picks"])
        case other:
            replay.case.differ(where, f"unknown operation {other!r}")


def replay_simulation(run: dict[str, Any]) -> Case:
    """A closed loop of several steps: the reference's picks were expanded, and must be ours too."""
    case = Case(f"simulation seed {run['seed']} ({run['argsort']})")
    seeds = [{"id": f"s{i}", "value": 0.0, "key": None} for i in range(run["groups"])]
    config = {"c": run.get("c", 1.0), "topk": run.get("topk", 2), "cap": run["cap"]}
    replay = Replay.open(case, seeds, config, visit_unit=1)
    for entry in run["log"]:
        where = f"step {entry['step']}"
        recorded = entry["original_select"]
        if run["argsort"] == "stable":
            compare_selection(replay, where, run["groups"], recorded["scale"], recorded["picks"])
        else:
            _compare_unstable(replay, where, run["groups"], recorded)
        for parent, child, value in entry["rollouts"]:
            replay.rollout(parent, None if child is None else {"id": child, "value": value, "key": f"code-{child}"})
        replay.flush()
        if run["argsort"] != "stable":
            _follow_unstable_order(replay, where, entry["after"]["order"])
        compare_state(replay, where, entry["after"])
    return case


def _compare_unstable(replay: Replay, where: str, count: int, recorded: dict[str, Any]) -> None:
    """With an unstable sort a pick may have the prior of any node of its value; everything else about it must be ours."""
    case = replay.case
    scored = score_nodes(replay.archive, exploration=replay.exploration, visit_unit=1)
    by_id = {s.node.id: s for s in scored}
    for i, pick in enumerate(recorded["picks"]):
        ours = by_id[pick["id"]]
        case.same(f"{where} pick {i} n", ours.visits, pick["n"])
        case.near(f"{where} pick {i} Q", ours.q, pick["Q"])
        tied = [s.prior for s in scored if s.node.value == ours.node.value]
        if not any(abs(prior - pick["P"]) <= 1e-12 for prior in tied):
            case.differ(f"{where} pick {i} P", f"{pick['P']} is the prior of no node of value {ours.node.value}")
    if [p.node.id for p in replay.select(count).parents] != [pick["id"] for pick in recorded["picks"]]:
        case.differ(where, "other picks among tied values", "unstable_argsort")


def _follow_unstable_order(replay: Replay, where: str, order: list[str]) -> None:
    """Which of equal values the capacity evicted is the processor's choice; go on from the recorded archive."""
    ours = [node.id for node in replay.archive.nodes]
    if ours == order:
        return
    values = [sorted(replay.nodes[name].value for name in set(a) - set(b)) for a, b in ((ours, order), (order, ours))]
    replay.case.differ(where, "other survivors among tied values", "unstable_argsort" if values[0] == values[1] else "")
    nodes = tuple(replay.nodes[name] for name in order)
    replay.archive = replay.archive.model_copy(update={"nodes": nodes})
