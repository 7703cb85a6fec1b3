"""Copies from and to a bucket of Google Cloud Storage, and the digests that it publishes."""

from base64 import b64decode
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from google.api_core.exceptions import NotFound

from infra.copies.gcs_upload import MARK, Parts, Rewrite, tidy_uploads
from infra.copies.store_digest import StoreDigest, algorithms
from infra.copies.uploads import Content, CopyPlan, CopyStore, ObjectStatus, Upload
from mizzen.objects.gcs import GCSStore
from mizzen.objects.store import STAGING, ChangedObject, ObjectInfo


class GCSCopyStore(GCSStore, CopyStore):
    """A bucket of Google Cloud Storage between which and other stores objects are copied."""

    def content(self, info: ObjectInfo) -> Content:
        """Read one version of a small object; see `CopyStore.content`.

        The client library resumes truncated responses.
        """
        blob = self._version(info)
        try:
            body = bytearray(blob.download_as_bytes(checksum=None))
        except NotFound:
            raise ChangedObject(self.uri(info.key)) from None
        if len(body) != info.size_bytes:
            raise ChangedObject(self.uri(info.key))
        return Content(body, _vouched(blob))

    def store_digest(self, info: ObjectInfo) -> StoreDigest | None:
        """Return the store's digest of an object; see `CopyStore.store_digest`."""
        try:
            return _vouched(self._version(info))
        except ChangedObject:
            return None

    def _version(self, info: ObjectInfo) -> Any:
        blob = self._bucket.get_blob(self._name(info.key))
        if blob is None or str(blob.generation) != info.tag:
            raise ChangedObject(self.uri(info.key))
        return blob

    def status(self, key: str) -> ObjectStatus | None:
        """Return size, tag and mark of an object; see `CopyStore.status`. The mark is metadata of the object."""
        blob = self._bucket.get_blob(self._name(key))
        if blob is None:
            return None
        return ObjectStatus(int(blob.size), str(blob.generation), (blob.metadata or {}).get(MARK, ""))

    @contextmanager
    def upload(self, plan: CopyPlan) -> Iterator[Upload]:
        """Start or resume an upload; see `CopyStore.upload`.

        Rewrites objects of Google Cloud Storage server-side; composes others of parts.
        """
        staged = f"{self._prefix}{STAGING}/{plan.mark}/"
        if isinstance(plan.source, GCSCopyStore) and plan.size_bytes:
            yield Rewrite(self._blob(plan.key), staged, plan, plan.source._blob(plan.source_key))
        else:
            yield Parts(self._blob(plan.key), staged, plan)

    def tidy_uploads(self, idle_s: float) -> None:
        """Remove abandoned uploads; see `CopyStore.tidy_uploads`.

        The service itself removes unfinished uploads of large puts after a week.
        """
        tidy_uploads(self._bucket, f"{self._prefix}{STAGING}/", idle_s)

    def make_durable(self, keys: Iterable[str]) -> None:
        """Do nothing: acknowledged objects are durable. See `CopyStore.make_durable`."""


def _vouched(blob: Any) -> StoreDigest | None:
    """Return the MD5; for a composed object, which has none, the CRC-32C."""
    known = {"md5": blob.md5_hash, "crc32c": blob.crc32c}
    found = (
        StoreDigest(name, b64decode(value).hex()) for name, value in known.items() if value and name in algorithms()
    )
    return next(found, None)
