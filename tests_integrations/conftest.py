"""Imports the libraries once. Scripts run in forked children, because an import takes seconds and a fork does not."""

import os
from zlib import crc32

# One thread: sums are the same on every machine, and two ranks fit on two cores.
os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
# GPUs only where they are asked for, as in `make test-gpu`.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import pytest

from tests_integrations.halves import HALF


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leaves the tests of the other half out, if this process runs one half."""
    if HALF in os.environ:
        others = [item for item in items if crc32(item.nodeid.encode()) % 2 != int(os.environ[HALF])]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the environment variables of schedulers and launchers."""
    for name in list(os.environ):
        if name.startswith("MIZZEN_") or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.delenv(name)
