"""An object store in an S3 bucket, or anything that speaks its protocol."""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
import botocore.session
from boto3.s3.transfer import TransferConfig
from botocore.config import Config
from botocore.exceptions import ClientError, NoCredentialsError

from mizzen.objects.buffers import Buffers
from mizzen.objects.looking import listed
from mizzen.objects.randomness import detach
from mizzen.objects.s3_reading import ABSENT, Fetching, Object, content, vouched
from mizzen.objects.s3_upload import MARK, Place, S3Upload, tidy_uploads
from mizzen.objects.store import (
    STAGING,
    Body,
    Content,
    Fetch,
    MissingObject,
    ObjectInfo,
    ObjectStat,
    check_key,
    check_prefix,
    chunks_of,
    holds,
)
from mizzen.objects.uploads import Plan
from mizzen.objects.vouched import Vouched
from mizzen.objects.workers import AT_ONCE, ending

_THERE = {"PreconditionFailed", "412"}
_CONFLICT = {"ConditionalRequestConflict", "409"}
_CONFLICTS = 20
_CONFLICT_S = 0.05
_ONE_PUT_BYTES = 8 << 20
"""What is smaller goes up in one request."""
_CONFIG = Config(
    connect_timeout=10,
    read_timeout=60,
    max_pool_connections=AT_ONCE,
    retries={"max_attempts": 5, "mode": "standard"},
)


class MissingCredentials(NoCredentialsError):  # type: ignore[misc]
    """No credentials were found; the message names the bucket, its region and the endpoint."""

    fmt = "{message}"

    def __init__(self, message: str) -> None:
        super().__init__(message=message)


class S3Store:
    """Objects of `bucket` below `prefix`. Safe to use from several threads."""

    def __init__(self, bucket: str, prefix: str = "") -> None:
        self._bucket = bucket
        self._prefix = f"{check_key(prefix)}/" if prefix else ""
        # A session of its own: boto3's default one may not be made from several threads at once.
        core = botocore.session.get_session()
        core.register_component("data_loader", _service_data())
        self._client: Any = boto3.session.Session(botocore_session=core).client("s3", config=_CONFIG)
        self._where = f"s3://{bucket} (region {self._client.meta.region_name}, {self._client.meta.endpoint_url})"
        self._client.meta.events.register("after-call.s3", self._say_where)
        if core.get_credentials() is None:
            self._client.meta.events.register("before-call.s3", self._refuse)
        detach("boto3", "botocore", "s3transfer", "urllib3")

    def _say_where(self, parsed: dict[str, Any], **_: Any) -> None:
        """Adds to an error's message which bucket it is of: S3's own do not say."""
        if "Error" in parsed:
            message = parsed["Error"].get("Message", "")
            parsed["Error"]["Message"] = f"{message.rstrip('.')}: {self._where}" if message else self._where

    def _refuse(self, **_: Any) -> None:
        raise MissingCredentials(f"no credentials for {self._where}")

    def put(self, key: str, body: Body) -> None:
        """See `ObjectStore.put`. What is large goes up in parts, several at a time."""
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
        """See `ObjectStore.create`. By `If-None-Match: *`."""
        for conflict in range(_CONFLICTS):
            try:
                self._client.put_object(Bucket=self._bucket, Key=self._name(key), Body=body, IfNoneMatch="*")
            except ClientError as error:
                code = error.response["Error"]["Code"]
                if code in _CONFLICT and conflict + 1 < _CONFLICTS:
                    time.sleep(_CONFLICT_S)  # Another one creates it, or removes it, at this moment.
                    continue
                if code in _THERE:
                    # The client tries again by itself: then the first try may have made it.
                    return holds(self, key, body)
                raise
            return True
        return False

    def get(self, key: str) -> bytes:
        """See `ObjectStore.get`."""
        return self._read(key)

    def get_range(self, key: str, start: int, end: int) -> bytes:
        """See `ObjectStore.get_range`."""
        if end <= start:
            if self.size(key) is None:
                raise self._missing(key)
            return b""
        try:
            return self._read(key, Range=f"bytes={start}-{end - 1}")
        except ClientError as error:
            if error.response["Error"]["Code"] == "InvalidRange":
                return b""
            raise

    @contextmanager
    def opened(self, key: str) -> Iterator[Fetch]:
        """See `ObjectStore.opened`. Each piece is a request of its own, all of them for the same version."""
        yield partial(self._fetch, key, Fetching(self._object(key)))

    def _fetch(self, key: str, fetching: Fetching, into: memoryview, start: int) -> int:
        return fetching(into, start) if into else len(self.get_range(key, start, start))

    def content(self, info: ObjectInfo) -> Content:
        """See `ObjectStore.content`."""
        return content(self._object(info.key), info.size_bytes, info.tag)

    def vouched(self, info: ObjectInfo) -> Vouched | None:
        """See `ObjectStore.vouched`."""
        of = self._object(info.key)
        said = self._client.head_object(**of.asked, ChecksumMode="ENABLED")
        return vouched(of, info.size_bytes, said) if said["ETag"].strip('"') == info.tag else None

    def look(self, keys: Sequence[str]) -> dict[str, ObjectInfo | None]:
        """See `ObjectStore.look`."""
        return listed(self, keys)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """See `ObjectStore.list`."""
        asked = {"Bucket": self._bucket, "Prefix": self._prefix + check_prefix(prefix)}
        if after:
            asked["StartAfter"] = self._prefix + after
        for page in self._client.get_paginator("list_objects_v2").paginate(**asked):
            for found in page.get("Contents", ()):
                key = found["Key"].removeprefix(self._prefix)
                if not key.startswith(f"{STAGING}/"):
                    yield ObjectInfo(key, found["Size"], found["ETag"].strip('"'))

    def size(self, key: str) -> int | None:
        """See `ObjectStore.size`."""
        found = self.stat(key)
        return None if found is None else found.size_bytes

    def stat(self, key: str) -> ObjectStat | None:
        """See `ObjectStore.stat`. The mark is metadata of the object."""
        try:
            found = self._client.head_object(Bucket=self._bucket, Key=self._name(key))
        except ClientError as error:
            if error.response["Error"]["Code"] in ABSENT:
                return None
            raise
        mark = found.get("Metadata", {}).get(MARK, "")
        return ObjectStat(int(found["ContentLength"]), found["ETag"].strip('"'), mark)

    @contextmanager
    def upload(self, plan: Plan) -> Iterator[S3Upload]:
        """See `ObjectStore.upload`. Parts of another bucket of the same cloud are copied there (`UploadPartCopy`)."""
        origin = None
        if isinstance(plan.source, S3Store) and plan.source._cloud() == self._cloud():
            origin = Place(plan.source._client, plan.source._bucket, plan.source._name(plan.source_key))
        staged = f"{self._prefix}{STAGING}/{plan.mark}"
        yield S3Upload(Place(self._client, self._bucket, self._name(plan.key)), staged, plan, origin)

    def settle(self, keys: Iterable[str]) -> None:
        """See `ObjectStore.settle`. What S3 has acknowledged is durable."""

    def tidy_uploads(self, idle_s: float) -> None:
        """See `ObjectStore.tidy_uploads`. Those of large puts whose writers died are removed with them."""
        tidy_uploads(self._client, self._bucket, self._prefix, idle_s)

    def delete(self, key: str) -> None:
        """See `ObjectStore.delete`."""
        self._client.delete_object(Bucket=self._bucket, Key=self._name(key))

    def forget(self, key: str) -> None:
        """See `ObjectStore.forget`. Nothing is held."""

    def tidy(self) -> None:
        """See `ObjectStore.tidy`. Whether a writer has died cannot be told; see `tidy_uploads`."""

    def uri(self, key: str) -> str:
        """See `ObjectStore.uri`."""
        return f"s3://{self._bucket}/{self._prefix}{check_prefix(key)}"

    def _cloud(self) -> str:
        endpoint = str(self._client.meta.endpoint_url)
        return "aws" if urlsplit(endpoint).netloc.endswith(".amazonaws.com") else endpoint

    def _name(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _object(self, key: str) -> Object:
        return Object(self._client, self._bucket, self._name(key), self.uri(key))

    def _missing(self, key: str) -> MissingObject:
        return MissingObject(f"no object {key!r} in s3://{self._bucket}/{self._prefix}")

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
    """The descriptions of AWS's services: to read them anew is most of the time of opening a store."""
    return botocore.session.get_session().get_component("data_loader")


def _config() -> TransferConfig:
    return TransferConfig(use_threads=not ending())
