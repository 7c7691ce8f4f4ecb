"""The strategies by the name that a request gives them (`search.strategy`). Nothing else knows which there are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from activities.select.best_of_n import BestOfN
from activities.select.epsilon_greedy import EpsilonGreedy
from activities.select.greedy import Greedy
from activities.select.puct import Puct
from activities.select.strategy import Strategy

STRATEGIES: Final[Mapping[str, Strategy]] = {
    "puct": Puct(),
    "best_of_n": BestOfN(),
    "greedy": Greedy(),
    "epsilon_greedy": EpsilonGreedy(),
}
