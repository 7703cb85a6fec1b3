"""Stores to test: one in a folder, one on an S3 server and one on an emulator of Google's, both on loopback."""

from pathlib import Path

import pytest

from mizzen.objects import ObjectStore, open_store
from tests.buckets import gcs_endpoint, gcs_url, s3_endpoint, s3_url

__all__ = ["gcs_endpoint", "gcs_url", "s3_endpoint", "s3_url"]


@pytest.fixture(params=["file", "s3", "gcs"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStore:
    """An empty store of each kind."""
    if request.param == "file":
        return open_store(f"file://{tmp_path}/bucket")
    url: str = request.getfixturevalue(f"{request.param}_url")
    return open_store(url)
