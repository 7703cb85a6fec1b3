"""Resumable uploads to a bucket of Google Cloud Storage: parts are temporary objects, which are then composed.

The service confirms a part by its MD5. A composed object has no MD5, so it is read back before it gets its final name.
Between two buckets of the service an object is rewritten server-side; the token of an unfinished rewrite is stored.
"""

import hashlib
import time
from base64 import b64decode
from collections import defaultdict
from dataclasses import replace
from typing import Any

from google.api_core.exceptions import NotFound, PreconditionFailed

from infra.copies.errors import CopyFailed
from infra.copies.uploads import CopyPlan, Read, Upload
from mizzen.objects.buffers import Buffers

MARK = "mizzen-copy"
"""Metadata key of the mark."""
_COMPOSED_AT_ONCE = 32
"""The limit of the service."""
_PIECE_BYTES = 8 << 20


class _Staged(Upload):
    """Base class of uploads: keeps temporary objects below a reserved prefix, and publishes the finished object."""

    def __init__(self, blob: Any, folder: str, plan: CopyPlan) -> None:
        """Create the upload of the object `blob`. `folder` is the name prefix of its temporary objects."""
        self.plan = plan
        self._blob = blob
        self._bucket = blob.bucket
        self._folder = folder

    def drop(self) -> None:
        """Remove all uploaded parts; see `Upload.drop`."""
        for blob in list(self._bucket.list_blobs(prefix=self._folder)):
            _delete(blob)

    def _publish(self, whole: Any) -> None:
        self._blob.metadata = {MARK: self.plan.mark}
        _rewrite(self._blob, whole)
        self.drop()

    def _published_by_another(self) -> bool:
        found = self._bucket.get_blob(self._blob.name)
        return found is not None and (found.metadata or {}).get(MARK) == self.plan.mark


class Parts(_Staged):
    """An `Upload` to Google Cloud Storage. An object of one part is uploaded in one request, by `finish`."""

    def __init__(self, blob: Any, folder: str, plan: CopyPlan) -> None:
        super().__init__(blob, folder, plan)
        self._body = bytearray()
        self._md5s: dict[int, str] = {}

    def missing(self) -> list[int]:
        """Return the parts that are not uploaded yet; see `Upload.missing`."""
        if self.plan.parts > 1:
            for blob in self._bucket.list_blobs(prefix=f"{self._folder}part-"):
                number = int(blob.name.rpartition("-")[2])
                start, end = self.plan.span(number)
                if blob.size == end - start:
                    self._md5s[number] = b64decode(blob.md5_hash).hex()
        return [number for number in range(self.plan.parts) if number not in self._md5s]

    def take(self, number: int, read: Read) -> None:
        """Upload a part; see `Upload.take`."""
        body = read()
        if self.plan.parts == 1:
            self._body = body
            return
        _upload(self._part(number), body)
        self._md5s[number] = hashlib.md5(body, usedforsecurity=False).hexdigest()

    def stored(self, number: int) -> bytearray | None:
        """Return the content of an uploaded part; see `Upload.stored`."""
        return bytearray(self._part(number).download_as_bytes())

    def finish(self) -> bool:
        """Assemble the object; see `Upload.finish`."""
        if self.plan.parts <= 1:
            self._blob.metadata = {MARK: self.plan.mark}
            _upload(self._blob, self._body)
            return True
        try:
            whole = self._compose([self._part(number) for number in range(self.plan.parts)])
            self._read_back(whole)
            self._publish(whole)
        except NotFound:
            if not self._published_by_another():
                raise CopyFailed(f"{self.plan.key}: its uploaded parts were removed; copy it again") from None
        return True

    def _part(self, number: int) -> Any:
        return self._bucket.blob(f"{self._folder}part-{number:06d}")

    def _compose(self, blobs: list[Any], level: int = 0) -> Any:
        if len(blobs) == 1:
            return blobs[0]
        composed = []
        for start in range(0, len(blobs), _COMPOSED_AT_ONCE):
            blob = self._bucket.blob(f"{self._folder}composed-{level}-{start}")
            # Emulators copy the metadata of the source and ignore the metadata in the request.
            blob.metadata = {MARK: self.plan.mark}
            blob.compose(blobs[start : start + _COMPOSED_AT_ONCE])
            composed.append(blob)
        return self._compose(composed, level + 1)

    def _read_back(self, whole: Any) -> None:
        """Compare the composed object with the MD5s of the uploaded parts.

        Raises:
            CopyFailed: a part differs.
        """
        for number in range(self.plan.parts):
            start, end = self.plan.span(number)
            digest = hashlib.md5(usedforsecurity=False)
            for at in range(start, end, _PIECE_BYTES):
                digest.update(whole.download_as_bytes(start=at, end=min(at + _PIECE_BYTES, end) - 1, checksum=None))
            if digest.hexdigest() != self._md5s[number]:
                self.drop()
                raise self.plan.damaged(number, f"md5:{digest.hexdigest()}", f"md5:{self._md5s[number]}")


class Rewrite(_Staged):
    """An `Upload` by a server-side copy within Google Cloud Storage. The whole object is one part."""

    copies_itself = True

    def __init__(self, blob: Any, folder: str, plan: CopyPlan, source: Any) -> None:
        """Create the upload. `source` is the object to copy."""
        super().__init__(blob, folder, replace(plan, part_bytes=plan.size_bytes))
        self._source = source
        self._whole = self._bucket.blob(f"{folder}whole")
        self._token = self._bucket.blob(f"{folder}token")

    def missing(self) -> list[int]:
        """Return the parts that are not uploaded yet; see `Upload.missing`."""
        return [] if self._whole.exists() else [0]

    def take(self, number: int, read: Read) -> None:
        """Upload a part; see `Upload.take`."""
        try:
            token = self._token.download_as_text()
        except NotFound:
            token = None
        try:
            _rewrite(self._whole, self._source, token, self._token, if_source_generation_match=self.plan.source_tag)
        except PreconditionFailed as error:
            uri = self.plan.source.uri(self.plan.source_key)
            raise CopyFailed(f"{uri} was changed during the copy; copy it again: {error}") from error

    def finish(self) -> bool:
        """Assemble the object; see `Upload.finish`. Compares the CRC-32C, which the service keeps for every object."""
        try:
            self._source.reload()
            self._whole.metadata = {MARK: self.plan.mark}
            self._whole.patch()
            if self._whole.crc32c != self._source.crc32c:
                self.drop()
                raise self.plan.damaged(0, f"crc32c:{self._whole.crc32c}", f"crc32c:{self._source.crc32c}")
            self.proof = "crc32c"
            self._publish(self._whole)
        except NotFound:
            if not self._published_by_another():
                raise CopyFailed(f"{self.plan.key}: the unfinished copy was removed; copy it again") from None
        return True


def tidy_uploads(bucket: Any, prefix: str, idle_s: float) -> None:
    """Remove the temporary objects of uploads below `prefix` that received no part for `idle_s` seconds."""
    uploads: dict[str, list[Any]] = defaultdict(list)
    for blob in bucket.list_blobs(prefix=prefix):
        uploads[blob.name.removeprefix(prefix).split("/")[0]].append(blob)
    for blobs in uploads.values():
        if max(blob.updated for blob in blobs).timestamp() <= time.time() - idle_s:
            for blob in blobs:
                _delete(blob)


def _upload(blob: Any, body: bytearray) -> None:
    """Upload bytes in one request. The client library compares the MD5 that the service returns."""
    blob.upload_from_file(Buffers([memoryview(body)]), size=len(body), checksum="md5")


def _rewrite(blob: Any, source: Any, token: str | None = None, kept: Any = None, **asked: Any) -> None:
    """Copy an object server-side, from the rewrite token `token` on. Each new token is stored in the blob `kept`."""
    while True:
        token, _, _ = blob.rewrite(source, token=token, **asked)
        if token is None:
            return
        if kept is not None:
            kept.upload_from_string(token)


def _delete(blob: Any) -> None:
    try:
        blob.delete()
    except NotFound:
        return
