"""Libraries are imported once, and scripts run in forked children: an import takes seconds, a fork does not."""

import os

# One thread: the same sums on every machine, and children of two ranks on two cores.
os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", CUDA_VISIBLE_DEVICES="")

import pytest


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """No variable of a scheduler or a launcher."""
    for name in list(os.environ):
        if name.startswith("MIZZEN_") or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.delenv(name)
