"""What every test may use: folders of the checkout, and skips that say why."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout's top folder."""
    return ROOT


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked gpu where no NVIDIA driver answers, with that reason."""
    if shutil.which("nvidia-smi") is None:
        skip = pytest.mark.skip(reason="no NVIDIA GPU: nvidia-smi is not installed")
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(skip)
