"""Copies from and to a bucket of S3, and the digests that S3 publishes.

S3 returns digests only with whole objects, not with ranges: the checksums that were requested at the upload, and the
ETag. The ETag is an MD5, or an MD5 of the parts' MD5s, unless the object is encrypted with a KMS or customer key.
"""

from base64 import b64decode
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from botocore.exceptions import ClientError

from infra.copies.s3_upload import MARK, S3Upload, has_md5, tidy_uploads
from infra.copies.store_digest import StoreDigest, algorithms
from infra.copies.uploads import Content, CopyPlan, CopyStore, ObjectStatus
from mizzen.objects.retries import Readable, fill
from mizzen.objects.s3 import S3Store
from mizzen.objects.s3_reading import ABSENT, CHANGED, CUTS, Exactly, Fetching, ObjectRef
from mizzen.objects.store import STAGING, ChangedObject, ObjectInfo


class S3CopyStore(S3Store, CopyStore):
    """A bucket of S3 between which and other stores objects are copied."""

    def content(self, info: ObjectInfo) -> Content:
        """Read one version of a small object; see `CopyStore.content`."""
        return content(self._object(info.key), info.size_bytes, info.tag)

    def store_digest(self, info: ObjectInfo) -> StoreDigest | None:
        """Return the store's digest of an object; see `CopyStore.store_digest`."""
        of = self._object(info.key)
        said = self._client.head_object(**of.asked, ChecksumMode="ENABLED")
        return store_digest(of, info.size_bytes, said) if said["ETag"].strip('"') == info.tag else None

    def status(self, key: str) -> ObjectStatus | None:
        """Return size, tag and mark of an object; see `CopyStore.status`. The mark is metadata of the object."""
        found = self._head(key)
        if found is None:
            return None
        mark = found.get("Metadata", {}).get(MARK, "")
        return ObjectStatus(int(found["ContentLength"]), found["ETag"].strip('"'), mark)

    @contextmanager
    def upload(self, plan: CopyPlan) -> Iterator[S3Upload]:
        """Start or resume an upload; see `CopyStore.upload`.

        Copies parts server-side (`UploadPartCopy`) between buckets of the same cloud.
        """
        origin = None
        if isinstance(plan.source, S3CopyStore) and plan.source._cloud() == self._cloud():
            origin = plan.source._object(plan.source_key)
        staged = f"{self._prefix}{STAGING}/{plan.mark}"
        yield S3Upload(self._object(plan.key), staged, plan, origin)

    def tidy_uploads(self, idle_s: float) -> None:
        """Remove abandoned uploads; see `CopyStore.tidy_uploads`.

        Also removes abandoned multipart uploads of large puts.
        """
        tidy_uploads(self._client, self._bucket, self._prefix, idle_s)

    def make_durable(self, keys: Iterable[str]) -> None:
        """Do nothing: acknowledged objects are durable. See `CopyStore.make_durable`."""

    def _cloud(self) -> str:
        endpoint = str(self._client.meta.endpoint_url)
        return "aws" if urlsplit(endpoint).netloc.endswith(".amazonaws.com") else endpoint


def content(of: ObjectRef, size_bytes: int, tag: str) -> Content:
    """Read one version of a small object; see `ObjectStore.content`.

    Raises:
        ChangedObject: the object was replaced or removed.
    """
    body = bytearray(size_bytes)
    headers: dict[str, Any] = {}
    fetching = Fetching(of, tag)

    @contextmanager
    def request(done: int) -> Iterator[Readable]:
        if done:
            with fetching.ranged(done, size_bytes) as rest:
                yield rest
            return
        try:
            said = of.client.get_object(**of.asked, IfMatch=f'"{tag}"', ChecksumMode="ENABLED")
        except ClientError as error:
            if error.response["Error"]["Code"] in CHANGED | ABSENT:
                raise ChangedObject(of.words) from None
            raise
        with said["Body"] as whole:
            if said["ContentLength"] != size_bytes or said["ETag"].strip('"') != tag:
                raise ChangedObject(of.words)
            headers.update(said)
            yield Exactly(whole, size_bytes)

    fill(memoryview(body), request, CUTS)
    return Content(body, store_digest(of, size_bytes, headers))


def store_digest(of: ObjectRef, size_bytes: int, said: dict[str, Any]) -> StoreDigest | None:
    """Return the strongest digest in the response `said` of S3 that this process can compute; None if there is none."""
    found: dict[str, StoreDigest] = {}
    kind = said.get("ChecksumType", "COMPOSITE" if "-" in said["ETag"] else "FULL_OBJECT")
    for name in algorithms():
        value = str(said.get(f"Checksum{name.upper()}", ""))
        if value and kind == "FULL_OBJECT":
            found[name] = StoreDigest(name, b64decode(value).hex())
    etag = str(said["ETag"]).strip('"')
    if has_md5(said):
        value, _, parts = etag.partition("-")
        if not parts:
            found["md5"] = StoreDigest("md5", value)
        elif part_bytes := _part_bytes(of, size_bytes, int(parts)):
            found["md5"] = StoreDigest("md5", value, part_bytes)
    return next((found[name] for name in algorithms() if name in found), None)


def _part_bytes(of: ObjectRef, size_bytes: int, parts: int) -> int:
    """Return the part size of a multipart object; 0 if the parts differ in size (except the last) or it is unknown."""
    if parts == 1:
        return size_bytes
    try:
        part = of.client.head_object(**of.asked, PartNumber=1)
    except ClientError:
        return 0  # The store does not support PartNumber, so it has no digest that can be compared.
    first = int(part["ContentLength"])
    return first if first and part.get("PartsCount", parts) == parts == -(-size_bytes // first) else 0
