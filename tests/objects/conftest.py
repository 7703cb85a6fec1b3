"""Stores to test: one in a folder, one on an S3 server and one on an emulator of Google's, both on loopback."""

import itertools
from collections.abc import Callable
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


@pytest.fixture
def bucket_of(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Makes the URL of a new empty bucket of a kind. S3's parts may be small here: real ones have at least 5 MiB."""
    monkeypatch.setattr("moto.s3.models.S3_UPLOAD_PART_MIN_SIZE", 1)
    numbers = itertools.count()

    def make(kind: str) -> str:
        if kind == "file":
            return f"file://{tmp_path}/bucket-{next(numbers)}"
        endpoint = request.getfixturevalue(f"{kind}_endpoint")
        for name, value in endpoint.environ.items():
            monkeypatch.setenv(name, value)
        return str(endpoint.bucket())

    return make
