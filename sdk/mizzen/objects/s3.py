"""An object store in a bucket of S3, or of a service that is compatible with S3."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any

import boto3
import botocore.session
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import ClientError, NoCredentialsError

from mizzen.objects.buffers import Buffers
from mizzen.objects.cloud_store import CloudStore, detach
from mizzen.objects.s3_reading import ABSENT, Fetching, ObjectRef
from mizzen.objects.store import (
    STAGING,
    Body,
    Fetch,
    ObjectInfo,
    check_prefix,
    chunks_of,
    holds,
)
from mizzen.objects.workers import AT_ONCE, ending

_THERE = {"PreconditionFailed", "412"}
_CONFLICT = {"ConditionalRequestConflict", "409"}
_CONFLICTS = 20
_CONFLICT_S = 0.05
_ONE_PUT_BYTES = 8 << 20
"""Smaller objects are uploaded in one request."""
_CONFIG = Config(
    connect_timeout=10,
    read_timeout=60,
    max_pool_connections=AT_ONCE,
    retries={"max_attempts": 5, "mode": "standard"},
)


class MissingCredentials(NoCredentialsError):  # type: ignore[misc]
    """No credentials were found. The message names the bucket, the region and the endpoint."""

    fmt = "{message}"

    def __init__(self, message: str) -> None:
        super().__init__(message=message)


class S3Store(CloudStore):
    """Stores objects in `bucket` below `prefix`. Thread-safe."""

    def __init__(self, bucket: str, prefix: str = "") -> None:
        super().__init__(prefix)
        self._bucket = bucket
        # A separate session: boto3's default session is not thread-safe to create.
        core = botocore.session.get_session()
        core.register_component("data_loader", _service_data())
        self._client: Any = boto3.session.Session(botocore_session=core).client("s3", config=_CONFIG)
        self._where = f"s3://{bucket} (region {self._client.meta.region_name}, {self._client.meta.endpoint_url})"
        self._client.meta.events.register("after-call.s3", self._say_where)
        if core.get_credentials() is None:
            self._client.meta.events.register("before-call.s3", self._refuse)
        detach("boto3", "botocore", "s3transfer", "urllib3")

    def _say_where(self, parsed: dict[str, Any], **_: Any) -> None:
        """Add the bucket to an error's message, because S3's own messages do not name it."""
        if "Error" in parsed:
            message = parsed["Error"].get("Message", "")
            parsed["Error"]["Message"] = f"{message.rstrip('.')}: {self._where}" if message else self._where

    def _refuse(self, **_: Any) -> None:
        raise MissingCredentials(f"no credentials for {self._where}")

    def put(self, key: str, body: Body) -> None:
        """Store an object; see `ObjectStore.put`. Large bodies are uploaded in concurrent parts."""
        name = self._name(key)
        if isinstance(body, Path):
            self._client.upload_file(str(body), self._bucket, name, Config=_config())
            return
        views = chunks_of(body)
        if sum(view.nbytes for view in views) < _ONE_PUT_BYTES:
            self._client.put_object(Bucket=self._bucket, Key=name, Body=b"".join(views))
        else:
            self._client.upload_fileobj(Buffers(views), self._bucket, name, Config=_config())

    def create(self, key: str, body: bytes) -> bool:
        """Create an object if its key is free; see `ObjectStore.create`. Uses `If-None-Match: *`."""
        for conflict in range(_CONFLICTS):
            try:
                self._client.put_object(Bucket=self._bucket, Key=self._name(key), Body=body, IfNoneMatch="*")
            except ClientError as error:
                code = error.response["Error"]["Code"]
                if code in _CONFLICT and conflict + 1 < _CONFLICTS:
                    time.sleep(_CONFLICT_S)  # A concurrent request creates or deletes the object.
                    continue
                if code in _THERE:
                    # The client retries by itself, so an earlier try may have created the object.
                    return holds(self, key, body)
                raise
            return True
        return False

    def get(self, key: str) -> bytes:
        """Return an object's content; see `ObjectStore.get`."""
        return self._read(key)

    def _range(self, key: str, start: int, end: int) -> bytes:
        try:
            return self._read(key, Range=f"bytes={start}-{end - 1}")
        except ClientError as error:
            if error.response["Error"]["Code"] == "InvalidRange":
                return b""
            raise

    @contextmanager
    def opened(self, key: str) -> Iterator[Fetch]:
        """Open an object for reading in pieces; see `ObjectStore.opened`.

        Each piece is a separate request; all requests read the same version.
        """
        yield partial(self._fetch, key, Fetching(self._object(key)))

    def _fetch(self, key: str, fetching: Fetching, into: memoryview, start: int) -> int:
        return fetching(into, start) if into else len(self.get_range(key, start, start))

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """List objects by prefix; see `ObjectStore.list`."""
        asked = {"Bucket": self._bucket, "Prefix": self._prefix + check_prefix(prefix)}
        if after:
            asked["StartAfter"] = self._prefix + after
        for page in self._client.get_paginator("list_objects_v2").paginate(**asked):
            for found in page.get("Contents", ()):
                key = found["Key"].removeprefix(self._prefix)
                if not key.startswith(f"{STAGING}/"):
                    yield ObjectInfo(key, found["Size"], found["ETag"].strip('"'))

    def stat(self, key: str) -> ObjectInfo | None:
        """Return size and tag of an object; see `ObjectStore.stat`."""
        found = self._head(key)
        if found is None:
            return None
        return ObjectInfo(key, int(found["ContentLength"]), found["ETag"].strip('"'))

    def delete(self, key: str) -> None:
        """Remove an object; see `ObjectStore.delete`."""
        self._client.delete_object(Bucket=self._bucket, Key=self._name(key))

    def uri(self, key: str) -> str:
        """Return an object's URI; see `ObjectStore.uri`."""
        return f"s3://{self._bucket}/{self._prefix}{check_prefix(key)}"

    def _object(self, key: str) -> ObjectRef:
        return ObjectRef(self._client, self._bucket, self._name(key), self.uri(key))

    def _head(self, key: str) -> dict[str, Any] | None:
        try:
            found: dict[str, Any] = self._client.head_object(Bucket=self._bucket, Key=self._name(key))
        except ClientError as error:
            if error.response["Error"]["Code"] in ABSENT:
                return None
            raise
        return found

    def _read(self, key: str, **asked: str) -> bytes:
        try:
            body: bytes = self._client.get_object(Bucket=self._bucket, Key=self._name(key), **asked)["Body"].read()
        except ClientError as error:
            if error.response["Error"]["Code"] in ABSENT:
                raise self._missing(key) from None
            raise
        return body


@cache
def _service_data() -> Any:
    """Return the descriptions of AWS's services, cached: loading them takes most of the time to open a store."""
    return botocore.session.get_session().get_component("data_loader")


def _config() -> TransferConfig:
    return TransferConfig(use_threads=not ending())
