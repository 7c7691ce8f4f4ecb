"""Fixtures that several test files share."""

from __future__ import annotations

from pathlib import Path

import pytest

from activities.blobs import Blobs, LocalStore


@pytest.fixture
def blobs(tmp_path: Path) -> Blobs:
    """A fresh object store in a directory."""
    return Blobs(LocalStore(tmp_path / "store"))
