"""What every search strategy is, and what strategies share: archive in, parents of one step out.

Knows no strategy in particular, no store and no Temporal. Chance comes in as an argument, seeded from the run's seed and the step.
"""

from __future__ import annotations

import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from activities.errors import InputError
from activities.records import ArchiveState, Node, ParentPick
from workflows.contracts.request import SearchSettings

SCALE_FLOOR = 1e-6


@dataclass(frozen=True)
class Scored:
    """One node's score and its parts; a strategy without a bonus scores a node by its value alone."""

    node: Node
    visits: int
    q: float
    prior: float
    bonus: float
    score: float


@dataclass(frozen=True)
class Selection:
    """Parents of one step, in order of their groups."""

    parents: tuple[Scored, ...]
    scale: float
    """Spread of the archive's values (:func:`value_scale`)."""
    note: str
    """Empty, or why some parents share a lineage or start more than one group."""


class Strategy(ABC):
    """One way to choose the parents of a step. Holds no state: what it knows of the search is the archive."""

    @abstractmethod
    def select(self, archive: ArchiveState, groups: int, settings: SearchSettings, rng: random.Random) -> Selection:
        """Pick one parent for every group; the grid is always full.

        Args:
            archive: as the last commit left it.
            groups: parents to pick (G).
            rng: the only source of chance, at the state that :func:`step_seed` gives it. Only ``rng.random()`` is called, whose
                sequence Python promises to keep.

        Raises:
            InputError: the archive has no node to start from.
        """


def step_seed(run_seed: int, step: int) -> int:
    """The seed of one step's choices, 31 bits, the same on every host."""
    return int.from_bytes(hashlib.sha256(f"{run_seed}/{step}/parents".encode()).digest()[:4]) >> 1


def value_scale(archive: ArchiveState) -> float:
    """Spread of values over non-seed nodes, or over all when there are only seeds; at least 1e-6."""
    seeds = set(archive.seeds)
    values = [n.value for n in archive.nodes if n.id not in seeds] or [n.value for n in archive.nodes]
    return max(max(values) - min(values), SCALE_FLOOR)


def check_not_empty(archive: ArchiveState) -> None:
    """Refuse what no strategy can start from.

    Raises:
        InputError: the archive holds no node.
    """
    if not archive.nodes:
        raise InputError("the archive is empty, and no search starts from nothing: its opening commit must hold the task's seeds")


def best_first(archive: ArchiveState) -> list[int]:
    """Positions of all live nodes by value, highest first; of equals the earlier node, on every machine."""
    values = [node.value for node in archive.nodes]
    return sorted(range(len(values)), key=values.__getitem__, reverse=True)


def cycled(order: Sequence[int], count: int) -> list[int]:
    """The first `count` of `order`, which begins anew where it ends."""
    return [order[i % len(order)] for i in range(count)]


def selected(archive: ArchiveState, picks: Sequence[int], note: str) -> Selection:
    """A selection that scores nodes by their value alone: no prior, no bonus."""

    def scored(node: Node) -> Scored:
        return Scored(node, archive.visits.get(node.id, 0), q=node.value, prior=0.0, bonus=0.0, score=node.value)

    return Selection(tuple(scored(archive.nodes[i]) for i in picks), value_scale(archive), note)


def as_pick(scored: Scored) -> ParentPick:
    """What the step's plan stores of it; the node itself stands beside it there."""
    return ParentPick(
        node=scored.node.id, visits=scored.visits, q=scored.q, prior=scored.prior, bonus=scored.bonus, score=scored.score
    )
