"""Skips the tests where no Kubernetes cluster can run."""

import pytest

from tests.kubernetes.cluster import missing


@pytest.fixture(autouse=True, scope="session")
def _capable() -> None:
    if (why := missing()) is not None:
        pytest.skip(why)
