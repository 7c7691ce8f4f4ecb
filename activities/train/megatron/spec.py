"""What a rank process is told at its start, as a file. Knows nothing of processes."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from pathlib import Path

from activities.train.megatron.options import MegatronOptions


@dataclass(frozen=True)
class RankSpec:
    """The same for all ranks of a group. Written and read by the same program on the same host."""

    options: MegatronOptions
    meeting: Path
    """File at which the ranks find each other (torch.distributed's FileStore)."""
    worker_pid: int

    def write(self, file: Path) -> None:
        file.write_bytes(pickle.dumps(self))

    @classmethod
    def read(cls, file: Path) -> RankSpec:
        found = pickle.loads(file.read_bytes())
        if not isinstance(found, cls):
            raise TypeError(f"{file} holds no RankSpec")
        return found
