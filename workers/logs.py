"""Logging: structlog, one JSON object a line into a file per role, readable lines on a terminal."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import TextIO

import structlog

# Without the values of local variables: a client's frames hold its credentials.
_TRACEBACKS = structlog.processors.ExceptionRenderer(structlog.tracebacks.ExceptionDictTransformer(show_locals=False))


def configure_logging(level: str, *, role: str, file: Path | None = None) -> None:
    """Send structlog and the standard library's logs to one place.

    Args:
        file: JSON lines are appended there; None writes to standard error (JSON unless it is a terminal).
    """
    stream: TextIO = sys.stderr
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        stream = file.open("a", buffering=1, encoding="utf-8")
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer() if file is None and stream.isatty() else structlog.processors.JSONRenderer()
    )
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _TRACEBACKS if file is not None else structlog.processors.format_exc_info,
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*shared, structlog.stdlib.add_logger_name],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, renderer],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    structlog.contextvars.bind_contextvars(role=role)
