"""Skips the tests where no Slurm cluster can run."""

import pytest

from tests.slurm.cluster import missing


@pytest.fixture(autouse=True)
def _capable() -> None:
    if (why := missing()) is not None:
        pytest.skip(why)
