"""Fixtures of the object stores: in a folder, on a local S3 server, and on a local Google Cloud Storage emulator."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest

from infra.copies import CopyStore, open_copy_store
from tests.buckets import gcs_endpoint, gcs_url, s3_endpoint, s3_url

__all__ = ["gcs_endpoint", "gcs_url", "s3_endpoint", "s3_url"]


@pytest.fixture(params=["file", "s3", "gcs"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> CopyStore:
    """Returns an empty store of each kind."""
    if request.param == "file":
        return open_copy_store(f"file://{tmp_path}/bucket")
    url: str = request.getfixturevalue(f"{request.param}_url")
    return open_copy_store(url)


@pytest.fixture
def bucket_of(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Returns a function that creates an empty bucket of a kind and returns its URL.

    The S3 server accepts parts of any size; the real service requires at least 5 MiB.
    """
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
