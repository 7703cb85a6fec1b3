"""Fixtures: buckets on storage servers on loopback."""

from collections.abc import Iterator

import pytest

from bench import buckets


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[buckets.EmulatorEndpoint]:
    """The endpoint of a simulated S3 server."""
    with buckets.s3() as endpoint:
        yield endpoint


@pytest.fixture(scope="session")
def gcs_endpoint() -> Iterator[buckets.EmulatorEndpoint]:
    """The endpoint of a simulated Google Cloud Storage server."""
    with buckets.gcs() as endpoint:
        yield endpoint


def _bucket(endpoint: buckets.EmulatorEndpoint, monkeypatch: pytest.MonkeyPatch) -> str:
    for name, value in endpoint.environ.items():
        monkeypatch.setenv(name, value)
    return endpoint.bucket()


@pytest.fixture
def s3_url(s3_endpoint: buckets.EmulatorEndpoint, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty prefix in a new S3 bucket."""
    return _bucket(s3_endpoint, monkeypatch)


@pytest.fixture
def gcs_url(gcs_endpoint: buckets.EmulatorEndpoint, monkeypatch: pytest.MonkeyPatch) -> str:
    """The URL of an empty prefix in a new Google Cloud Storage bucket."""
    return _bucket(gcs_endpoint, monkeypatch)
