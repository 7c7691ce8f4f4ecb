"""One worker of a role as `tttd worker ROLE` starts it, with two things put in: a store that counts, and the trainer's back-end.

    python -m scripts.scale.worker ROLE

Every quarter of a second it writes what it counted to HOME/numbers/ROLE.json.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from activities.blobs import Blobs
from scripts.scale.counting import CountingStore
from workers import roles
from workers.connect import connect_blobs, leave
from workers.settings import Settings, load_settings

STORE_DELAY = "SCALE_STORE_SECONDS"
"""Variable with the seconds that every request to the object store takes longer."""
_PAUSE_SECONDS = 0.25


def main(role: str) -> int:
    settings = load_settings()
    store = CountingStore(connect_blobs(settings).store, float(os.environ[STORE_DELAY]))

    def counted_blobs(settings: Settings) -> Blobs:
        return Blobs(store)

    roles.connect_blobs = counted_blobs  # type: ignore[attr-defined]
    if role == "train":
        _replace_back_end()
    file = settings.home / "numbers" / f"{role}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    threading.Thread(target=_keep_writing, args=(file, store), daemon=True, name="numbers").start()
    return roles.run_role(role, settings)


def _replace_back_end() -> None:
    """The one place where the room names its back-end; everything around it stays."""
    from activities.train import activity
    from scripts.scale.trainer import NoOpBackend

    activity.TorchBackend = NoOpBackend  # type: ignore[attr-defined,assignment]


def _keep_writing(file: Path, store: CountingStore) -> None:
    while True:
        trainer: Any = sys.modules.get("scripts.scale.trainer")
        document = {
            "store": {name: asdict(count) for name, count in store.counts().items()},
            "work_seconds": getattr(trainer, "work_seconds", 0.0),
        }
        temporary = file.with_suffix(".tmp")
        temporary.write_text(json.dumps(document), encoding="utf-8")
        temporary.replace(file)
        time.sleep(_PAUSE_SECONDS)


if __name__ == "__main__":
    leave(main(sys.argv[1]))
