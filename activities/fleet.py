"""Which engines there are: notices that engine workers write and samplers read. Knows no HTTP.

A notice is a mere hint (`fleet/engines/<id>`, rewritten every few seconds); what an engine really serves is proved by the gate.
"""

from __future__ import annotations

from pydantic import ValidationError

from activities.blobs import Blobs, MissingKey
from activities.records import EngineNotice, canonical_json

PREFIX = "fleet/engines/"
STALE_SECONDS = 20.0
"""An engine worker writes every few seconds; one that has been silent this long is not asked."""


def write_notice(blobs: Blobs, notice: EngineNotice) -> None:
    blobs.store.put(PREFIX + notice.engine, canonical_json(notice))


def withdraw_notice(blobs: Blobs, engine: str) -> None:
    blobs.store.delete(PREFIX + engine)


def read_notice(blobs: Blobs, engine: str) -> EngineNotice | None:
    """The engine's last notice; None if there is none, or one that a worker of another version wrote in its own form.

    One unreadable notice must not stop everybody else's sampling: an engine that cannot be understood is not there.
    """
    try:
        return EngineNotice.model_validate_json(blobs.store.get(PREFIX + engine))
    except (MissingKey, ValidationError):
        return None


def is_live(notice: EngineNotice, now: float) -> bool:
    """Whether the engine's worker has written lately.

    Args:
        now: Unix seconds.
    """
    return now - notice.updated < STALE_SECONDS


def live_engines(blobs: Blobs, model_digest: str, now: float) -> list[EngineNotice]:
    """Notices of engines that serve the model and have written lately, by id.

    Args:
        now: Unix seconds.
    """
    notices = (read_notice(blobs, key.removeprefix(PREFIX)) for key in blobs.store.keys(PREFIX))
    return [n for n in notices if n is not None and n.model_digest == model_digest and is_live(n, now)]
