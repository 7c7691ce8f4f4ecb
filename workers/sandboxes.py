"""From deployment settings to a sandbox's settings. Reads the token file, so that the secret stands in no setting and no log."""

from __future__ import annotations

from activities.judge.sandbox import SandboxSettings
from workers.settings import Settings


def sandbox_settings(settings: Settings) -> SandboxSettings:
    """How this host's judge wants its sandbox.

    Raises:
        SystemExit: the token file cannot be read; names it.
    """
    file = settings.judge_remote_token_file
    try:
        token = None if file is None else file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SystemExit(f"tttd: judge_remote_token_file: {error}") from None
    return SandboxSettings(
        backend=settings.judge_backend,
        uid_base=settings.judge_uid_base,
        accept_unsafe=settings.judge_accept_unsafe,
        remote_url=settings.judge_remote_url,
        remote_token=token,
    )
