"""An object store in an S3 bucket, or anything that speaks its protocol."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config
from botocore.exceptions import ClientError

from infra.objects.store import MissingObject, ObjectInfo, check_key, check_prefix

_ABSENT = {"404", "NoSuchKey", "NotFound"}


class S3Store:
    """Objects of `bucket` below `prefix`. Safe to use from several threads."""

    def __init__(self, bucket: str, prefix: str = "") -> None:
        self._bucket = bucket
        self._prefix = f"{check_key(prefix)}/" if prefix else ""
        # A session of its own: boto3's default one may not be made from several threads at once.
        self._client: Any = boto3.session.Session().client(
            "s3", config=Config(connect_timeout=10, read_timeout=60, retries={"max_attempts": 3, "mode": "standard"})
        )

    def put(self, key: str, body: bytes | Path) -> None:
        """See `ObjectStore.put`. Files go up in parts where they are large."""
        name = self._name(key)
        if isinstance(body, bytes):
            self._client.put_object(Bucket=self._bucket, Key=name, Body=body)
        else:
            self._client.upload_file(str(body), self._bucket, name)

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

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """See `ObjectStore.list`."""
        asked = {"Bucket": self._bucket, "Prefix": self._prefix + check_prefix(prefix)}
        if after:
            asked["StartAfter"] = self._prefix + after
        for page in self._client.get_paginator("list_objects_v2").paginate(**asked):
            for found in page.get("Contents", ()):
                yield ObjectInfo(found["Key"].removeprefix(self._prefix), found["Size"], found["ETag"].strip('"'))

    def size(self, key: str) -> int | None:
        """See `ObjectStore.size`."""
        try:
            return int(self._client.head_object(Bucket=self._bucket, Key=self._name(key))["ContentLength"])
        except ClientError as error:
            if error.response["Error"]["Code"] in _ABSENT:
                return None
            raise

    def delete(self, key: str) -> None:
        """See `ObjectStore.delete`."""
        self._client.delete_object(Bucket=self._bucket, Key=self._name(key))

    def uri(self, key: str) -> str:
        """See `ObjectStore.uri`."""
        return f"s3://{self._bucket}/{self._prefix}{check_prefix(key)}"

    def _name(self, key: str) -> str:
        return self._prefix + check_key(key)

    def _missing(self, key: str) -> MissingObject:
        return MissingObject(f"no object {key!r} in s3://{self._bucket}/{self._prefix}")

    def _read(self, key: str, **asked: str) -> bytes:
        try:
            body: bytes = self._client.get_object(Bucket=self._bucket, Key=self._name(key), **asked)["Body"].read()
        except ClientError as error:
            if error.response["Error"]["Code"] in _ABSENT:
                raise self._missing(key) from None
            raise
        return body
