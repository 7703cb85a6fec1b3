"""Copies from and to a folder of a file system."""

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

from infra.copies.file_upload import FileUpload, WholeFile, mark_of, open_staged
from infra.copies.store_digest import StoreDigest
from infra.copies.uploads import Content, CopyPlan, CopyStore, ObjectStatus, Upload
from mizzen.objects.disk import held, idle, lock, make_folders, read
from mizzen.objects.files import UPLOADS, FileStore, remove_if, tag_of
from mizzen.objects.store import STAGING, ChangedObject, MissingObject, ObjectInfo


class FileCopyStore(FileStore, CopyStore):
    """A folder between which and other stores objects are copied."""

    def tidy_uploads(self, idle_s: float) -> None:
        """Remove abandoned uploads; see `CopyStore.tidy_uploads`."""
        for path in self._staging():
            if path.suffix == UPLOADS:
                remove_if(path, lambda descriptor: lock(descriptor) is not False and idle(descriptor, idle_s))

    def content(self, info: ObjectInfo) -> Content:
        """Read one version of a small object; see `CopyStore.content`. The result has no digest."""
        body = bytearray(info.size_bytes)
        try:
            descriptor = self._open(info.key)
        except MissingObject:
            raise ChangedObject(self.uri(info.key)) from None
        try:
            if read(descriptor, body, 0) < len(body) or tag_of(os.fstat(descriptor)) != info.tag:
                raise ChangedObject(self.uri(info.key))
        finally:
            os.close(descriptor)
        return Content(body, None)

    def store_digest(self, info: ObjectInfo) -> StoreDigest | None:
        """Return None: a file system stores no digest. See `CopyStore.store_digest`."""
        return None

    def status(self, key: str) -> ObjectStatus | None:
        """Return size, tag and mark of an object; see `CopyStore.status`.

        The mark is an extended attribute, if the file system supports these.
        """
        try:
            descriptor = self._open(key)
        except MissingObject:
            return None
        try:
            status = os.fstat(descriptor)
            return ObjectStatus(status.st_size, tag_of(status), mark_of(descriptor))
        finally:
            os.close(descriptor)

    @contextmanager
    def upload(self, plan: CopyPlan) -> Iterator[Upload]:
        """Start or resume an upload; see `CopyStore.upload`.

        Writes a staged file and renames it. From another folder the kernel copies.
        """
        path = self._path(plan.key)
        make_folders(self._root)
        with ExitStack() as stack:
            staged = stack.enter_context(held(self._root, self._root / STAGING, [])) / f"{plan.mark}{UPLOADS}"
            descriptor = open_staged(staged, plan)
            stack.callback(os.close, descriptor)

            def publish() -> None:
                self._place(path, plan.key, staged.replace)

            if plan.parts <= 1:
                yield WholeFile(plan, staged, descriptor, publish)
                return
            source = None
            if isinstance(plan.source, FileStore):
                source = plan.source._open(plan.source_key)
                stack.callback(os.close, source)
            yield FileUpload(plan, staged, descriptor, source, publish)

    def make_durable(self, keys: Iterable[str]) -> None:
        """Make the names of uploaded objects durable; see `CopyStore.make_durable`. Syncs each folder once."""
        for folder in {self._path(key).parent for key in keys}:
            self._make_durable(folder)
