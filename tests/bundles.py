"""Bundles as a stranger reads them: a tar, its members, and the words in its documents."""

from __future__ import annotations

import re
import tarfile
from pathlib import Path


def members(path: Path) -> dict[str, bytes]:
    """Every file of a bundle by name."""
    with tarfile.open(path) as tar:
        return {member.name: file.read() for member in tar if (file := tar.extractfile(member))}


def holding_word(path: Path, word: str) -> list[str]:
    """Names of the text files that hold a word by itself: a short host's name is in any large binary by chance."""
    pattern = re.compile(rb"(?<![A-Za-z0-9])" + re.escape(word.encode()) + rb"(?![A-Za-z0-9])")
    texts = {name: data for name, data in members(path).items() if data[:1] in b"{[#"}
    return [name for name, data in texts.items() if pattern.search(data)]
