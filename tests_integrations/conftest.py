"""Imports the libraries once. Scripts run in forked children, because an import takes seconds and a fork does not."""

import os

# One thread: sums are the same on every machine, and two ranks fit on two cores.
os.environ.update(OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
# GPUs only where they are asked for, as in `make test-gpu`.
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import pytest


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Removes the environment variables of schedulers and launchers."""
    for name in list(os.environ):
        if name.startswith("MIZZEN_") or name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.delenv(name)
