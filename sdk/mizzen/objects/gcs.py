"""An object store in a bucket of Google Cloud Storage."""

import json
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

with warnings.catch_warnings():
    # Where grpc is installed for something else, google.api_core asks for grpcio-status. Only HTTP is used here.
    warnings.filterwarnings("ignore", "Please install grpcio-status", ImportWarning)
    from google.api_core.exceptions import NotFound, PreconditionFailed, RequestRangeNotSatisfiable

from google.auth.credentials import AnonymousCredentials
from google.cloud import storage
from google.oauth2.credentials import Credentials

from mizzen.objects.buffers import Buffers
from mizzen.objects.cloud_store import CloudStore, detach
from mizzen.objects.store import (
    STAGING,
    Body,
    Fetch,
    ObjectInfo,
    check_prefix,
    chunks_of,
    holds,
)

_EMULATOR = "STORAGE_EMULATOR_HOST"
_TOKEN_FILE = "MIZZEN_GCS_TOKEN_FILE"
"""Names a file with a token and its expiry, which mizzen's agent renews (JSON)."""


class GCSStore(CloudStore):
    """Stores objects in `bucket` below `prefix`. Thread-safe.

    `create` relies on `ifGenerationMatch=0`, which the service enforces but emulators may not.
    """

    def __init__(self, bucket: str, prefix: str = "") -> None:
        super().__init__(prefix)
        if (token_file := os.environ.get(_TOKEN_FILE)) and not os.environ.get("GOOGLE_APPLICATION_CREDENTIALS"):
            # No request needs the project, for which the library would ask other credentials.
            client: Any = storage.Client(project="_", credentials=_credentials(token_file))
        elif os.environ.get(_EMULATOR):
            client = storage.Client(project="emulated", credentials=AnonymousCredentials())  # type: ignore[no-untyped-call]
        else:
            client = storage.Client()
        detach("google", "requests", "urllib3")
        self._client = client
        self._bucket: Any = client.bucket(bucket)

    def put(self, key: str, body: Body) -> None:
        """Store an object; see `ObjectStore.put`."""
        blob = self._blob(key)
        if isinstance(body, Path):
            blob.upload_from_filename(str(body))
            return
        views = chunks_of(body)
        blob.upload_from_file(Buffers(views), size=sum(view.nbytes for view in views))

    def create(self, key: str, body: bytes) -> bool:
        """Create an object if its key is free; see `ObjectStore.create`."""
        try:
            self._blob(key).upload_from_string(body, if_generation_match=0)
        except PreconditionFailed:
            # The client retries by itself, so an earlier try may have created the object.
            return holds(self, key, body)
        return True

    def get(self, key: str) -> bytes:
        """Return an object's content; see `ObjectStore.get`."""
        try:
            body: bytes = self._blob(key).download_as_bytes()
        except NotFound:
            raise self._missing(key) from None
        return body

    def _range(self, key: str, start: int, end: int) -> bytes:
        try:
            body: bytes = self._blob(key).download_as_bytes(start=start, end=end - 1)
        except NotFound:
            raise self._missing(key) from None
        except RequestRangeNotSatisfiable:
            return b""
        return body

    @contextmanager
    def opened(self, key: str) -> Iterator[Fetch]:
        """Open an object for reading in pieces; see `ObjectStore.opened`. Each piece is a separate request."""

        def fetch(into: memoryview, start: int) -> int:
            body = self.get_range(key, start, start + len(into))
            into[: len(body)] = body
            return len(body)

        yield fetch

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """List objects by prefix; see `ObjectStore.list`."""
        asked = {"prefix": self._prefix + check_prefix(prefix)}
        if after:
            asked["start_offset"] = self._prefix + after
        for blob in self._client.list_blobs(self._bucket, **asked):
            key = blob.name.removeprefix(self._prefix)
            if key > after and not key.startswith(f"{STAGING}/"):
                yield ObjectInfo(key, int(blob.size), str(blob.generation))

    def stat(self, key: str) -> ObjectInfo | None:
        """Return size and tag of an object; see `ObjectStore.stat`."""
        blob = self._bucket.get_blob(self._name(key))
        return None if blob is None else ObjectInfo(key, int(blob.size), str(blob.generation))

    def delete(self, key: str) -> None:
        """Remove an object; see `ObjectStore.delete`."""
        try:
            self._blob(key).delete()
        except NotFound:
            return

    def uri(self, key: str) -> str:
        """Return an object's URI; see `ObjectStore.uri`."""
        return f"gs://{self._bucket.name}/{self._prefix}{check_prefix(key)}"

    def _blob(self, key: str) -> Any:
        return self._bucket.blob(self._name(key))


def _credentials(token_file: str) -> Credentials:
    """Return credentials that read the file when they have no token, and again before that expires."""

    def read(_: object, scopes: object) -> tuple[str, datetime]:  # noqa: ARG001 - passed by name
        said = json.loads(Path(token_file).read_bytes())
        return said["token"], datetime.fromisoformat(said["expiry"]).astimezone(UTC).replace(tzinfo=None)

    return Credentials(None, refresh_handler=read)  # type: ignore[no-untyped-call]
