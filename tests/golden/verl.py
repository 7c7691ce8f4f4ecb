"""Replays open-ttt-verl's acquire/submit archive as far as it can be compared: it counts groups, we count rollouts.

With G = R a full group is one unit of visits in both, so T, n and m are compared exactly, and Q and prior of a pick as long as both
archives hold the same nodes. Its scale, top-k and capacity rules are other ones; where they show, the difference is checked to
be theirs and the replay goes on from the recorded parent. Source: spec algorithm 1.8.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from activities.select.puct import score_nodes
from tests.golden.archive import Replay
from tests.golden.outcome import Case, number

DEFAULTS = {"c": 1.0, "topk": 2, "cap": 1000, "rollout_n": 1}


@dataclass
class _Groups:
    """Which parent each acquired group has, and how many of its rollouts have come in."""

    parent: dict[str, str] = field(default_factory=dict)
    submitted: dict[str, int] = field(default_factory=dict)
    known: set[str] = field(default_factory=set)
    """Nodes of the groups that were complete before the present one."""
    refused: bool = False
    """The reference raised: its counters have stopped following the rollouts."""


def replay_verl(name: str, scenario: dict[str, Any]) -> Case:
    """One scenario of acquires and submits."""
    case = Case(name)
    config = DEFAULTS | scenario["config"]
    seeds = [{"key": None, **seed} for seed in scenario["seeds"]]
    replay = Replay.open(case, seeds, config, visit_unit=config["rollout_n"])
    groups = _Groups()
    for index, entry in enumerate(scenario["trace"]):
        where = f"event {index}"
        if "picked" in entry:
            _acquire(replay, groups, where, entry)
        elif "state" in entry:
            _submit(replay, groups, where, entry, config["rollout_n"])
        else:
            groups.refused = True
            case.differ(where, f"the reference raised: {entry}", "verl_refused")
    return case


def _acquire(replay: Replay, groups: _Groups, where: str, entry: dict[str, Any]) -> None:
    uid, picked, stats = entry["op"][1], entry["picked"], entry["stats"]
    again = uid in groups.parent
    groups.parent[uid] = picked
    groups.submitted.setdefault(uid, 0)
    scored = {s.node.id: s for s in score_nodes(replay.archive, exploration=replay.exploration, visit_unit=replay.visit_unit)}
    if again or picked not in scored or groups.refused:
        replay.case.checks += 1  # asked again for a group that has its parent; nothing new is chosen
        return
    ours = scored[picked]
    replay.case.same(f"{where} n", ours.visits, stats["n"] * replay.visit_unit)
    replay.case.near(f"{where} Q", ours.q, stats["Q"])
    replay.case.near(f"{where} P", ours.prior, stats["P"])
    if all(node.id in replay.archive.seeds for node in replay.archive.nodes):
        replay.case.near(f"{where} score", ours.score, stats["score"])
    elif abs(ours.score - number(stats["score"])) > 1e-9:
        replay.case.differ(where, f"score {ours.score} beside {stats['score']}", "verl_scale")


def _submit(replay: Replay, groups: _Groups, where: str, entry: dict[str, Any], rollouts: int) -> None:
    _, uid, child, value, _ = entry["op"]
    if groups.submitted[uid] >= rollouts:
        replay.case.differ(where, f"rollout {groups.submitted[uid] + 1} of a group of {rollouts}", "verl_late_submit")
        return
    groups.submitted[uid] += 1
    record = None if child is None else {"id": child, "value": value, "key": f"code-{child}"}
    replay.rollout(groups.parent[uid], record)
    if groups.submitted[uid] < rollouts:
        return
    replay.flush()
    if not groups.refused:
        _compare_counters(replay, where, entry["state"])
        _compare_nodes(replay, where, entry["state"]["order"], groups.known)
    groups.known = set(replay.nodes)


def _compare_counters(replay: Replay, where: str, state: dict[str, Any]) -> None:
    unit = replay.visit_unit
    replay.case.same(f"{where} T", replay.archive.total_visits, state["T"] * unit)
    replay.case.same(f"{where} n", replay.archive.visits, {k: n * unit for k, n in state["n"].items()})
    replay.case.same(f"{where} m", replay.archive.best_child, {k: number(m) for k, m in state["m"].items()})


def _compare_nodes(replay: Replay, where: str, order: list[str], known: set[str]) -> None:
    """Same nodes, whatever the order (it sorts its list by value). Goes on from the recorded nodes where rules differ."""
    ours = {node.id for node in replay.archive.nodes}
    if ours == set(order):
        replay.case.checks += 1
        return
    apart = ours ^ set(order)
    seeds = set(replay.archive.seeds)
    parents = {replay.nodes[name].ancestors[0] for name in apart if replay.nodes[name].ancestors}
    expanded_before = {n.ancestors[0] for name, n in replay.nodes.items() if n.ancestors and name in known}
    if seeds - set(order):
        kind = "verl_seeds_evicted"
    elif not apart & seeds and parents and parents <= expanded_before:
        kind = "verl_topk_per_event"
    else:
        kind = ""
    replay.case.differ(where, f"live here alone {sorted(ours - set(order))}, there alone {sorted(set(order) - ours)}", kind)
    nodes = tuple(replay.nodes[name] for name in order)
    replay.archive = replay.archive.model_copy(update={"nodes": nodes})
