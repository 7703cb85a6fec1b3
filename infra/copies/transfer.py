"""Implements copies: checks which parts the target has, transfers the missing ones, and verifies the result."""

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from hashlib import sha256
from types import TracebackType
from typing import TypeAlias

from infra.copies.bandwidth import BandwidthShare
from infra.copies.errors import CopyFailed, DamagedSource
from infra.copies.manifest import object_checksum
from infra.copies.store_digest import InOrder, StoreDigest, check, digest_of
from infra.copies.uploads import CopyPlan, CopyStore, Upload
from mizzen.objects import checksums
from mizzen.objects.buffers import aligned
from mizzen.objects.store import ChangedObject, Fetch, ObjectInfo
from mizzen.objects.workers import AT_ONCE, Workers

_MOST_PARTS = 10_000
"""The limit of S3."""
_HELD_BYTES = 256 << 20
"""Maximum total size of the parts in memory, unless a single part is larger."""
_ENGINE = "2"
"""Version of the copy algorithm. It is part of the mark, so copies of a version that verified less are not trusted."""

Progress: TypeAlias = Callable[[int, int], None]
"""Called with the bytes done and the total bytes."""


class Moving:
    """A copy of one or more objects between two stores. Its objects share threads, bandwidth and name."""

    def __init__(
        self, source: CopyStore, target: CopyStore, name: str, part_bytes: int, share: BandwidthShare | None
    ) -> None:
        self.source = source
        self.target = target
        self._name = name
        self._part_bytes = part_bytes
        self._share = share
        self._over = threading.Event()
        self.workers = Workers(AT_ONCE)

    def __enter__(self) -> "Moving":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self.workers.__exit__(kind, error, trace)

    def plan(self, info: ObjectInfo, to: str) -> CopyPlan:
        """Return the plan for copying an object to the key `to`."""
        part_bytes = max(self._part_bytes, -(-info.size_bytes // _MOST_PARTS))
        words = (_ENGINE, self._name, self.source.uri(info.key), info.tag, to, str(part_bytes))
        mark = sha256("\0".join(words).encode()).hexdigest()[:32]
        return CopyPlan(self.source, info.key, info.tag, info.size_bytes, to, part_bytes, mark)

    def is_there(self, plan: CopyPlan, checksum: str | None) -> bool:
        """Return whether the target already has the object, by its checksum, its mark, or its content."""
        found = self.target.status(plan.key)
        if found is None or found.size_bytes != plan.size_bytes:
            return False
        if checksum is not None:
            return object_checksum(self.target, plan.key, checksum.partition(":")[0]) == checksum
        return found.mark == plan.mark or self._difference(plan) is None

    def algorithm(self, plan: CopyPlan, checksum: str | None) -> str:
        """Return the algorithm that verified an existing copy when it was made; empty if there was none."""
        if checksum is not None:
            return checksum.partition(":")[0]
        store_digest = self.source.store_digest(_version(plan))
        return store_digest.algorithm if store_digest else ""

    def move(self, plan: CopyPlan, checksum: str | None, progress: Progress | None) -> tuple[int, str]:
        """Transfer the missing parts and assemble the object.

        Returns the number of bytes transferred, and the algorithm that verified them: see `Copied.verified`.

        Raises:
            CopyFailed, CopyInUse: see `copying.copy_object`.
        """
        with self.target.upload(plan) as upload:
            proof = _Proof(checksum)
            try:
                if upload.plan.parts <= 1:
                    moved_bytes = self._bring_whole(upload, proof)
                else:
                    moved_bytes = self._bring_parts(upload, proof, progress)
                if upload.copies_itself and plan.parts > 1:
                    self._check_unchanged(plan)
                store_digest = upload.finish()
            except ChangedObject:
                upload.drop()
                raise _changed(plan) from None
            except DamagedSource:
                upload.drop()
                raise
        difference = None if store_digest else self._difference(plan)
        if difference is None and checksum is not None and not proof.has_checksum:
            found = object_checksum(self.target, plan.key, checksum.partition(":")[0])
            difference = None if found == checksum else f"{found} at the target, expected {checksum}"
        if difference is not None:
            self.target.delete(plan.key)
            raise CopyFailed(f"{plan.key}: {difference}")
        return moved_bytes, checksum.partition(":")[0] if checksum else proof.algorithm or upload.proof

    def _bring_whole(self, upload: Upload, proof: "_Proof") -> int:
        """Transfer an object of one part, or an empty object. Return the number of bytes transferred."""
        plan = upload.plan

        def read() -> bytearray:
            body, store_digest = self.source.content(_version(plan))
            proof.judge(body, store_digest, plan)
            return body

        if not plan.parts:
            read()
        missing = upload.missing()
        for number in missing:
            self._draw(plan.size_bytes)
            upload.take(number, read)
        return plan.size_bytes if missing else 0

    def _bring_parts(self, upload: Upload, proof: "_Proof", progress: Progress | None) -> int:
        plan = upload.plan
        missing = set(upload.missing())
        store_digest = None if upload.copies_itself else self.source.store_digest(_version(plan))
        order = InOrder(store_digest) if store_digest else None
        moved_bytes = sum(_size(plan, number) for number in missing)
        done_bytes = plan.size_bytes - moved_bytes
        under_way: deque[tuple[int, Future[None]]] = deque()

        def bring(number: int) -> None:
            def read() -> bytearray:
                body = self._part(plan, fetch, number)
                if order is not None:
                    order.add(number, body)
                return body

            try:
                if number in missing:
                    self._draw(_size(plan, number))
                    upload.take(number, read)
                # Parts that an interrupted copy has uploaded must be included in the digest of the object.
                elif order is not None and (body := upload.stored(number)) is not None:
                    order.add(number, body)
                else:
                    self._draw(_size(plan, number))
                    read()
            except BaseException:
                if order is not None:
                    order.end()
                raise

        def end() -> None:
            nonlocal done_bytes
            number, brought = under_way.popleft()
            brought.result()
            done_bytes += _size(plan, number) if number in missing else 0
            if progress is not None and done_bytes < plan.size_bytes:
                progress(done_bytes, plan.size_bytes)

        with self.source.opened(plan.source_key) as fetch:
            try:
                for number in range(plan.parts) if order else sorted(missing):
                    if len(under_way) >= max(1, min(AT_ONCE, _HELD_BYTES // plan.part_bytes)):
                        end()
                    under_way.append((number, self.workers.submit(bring, number)))
                while under_way:
                    end()
            except BaseException:
                self._give_up(order, [brought for _, brought in under_way])
                raise
        self._check_unchanged(plan)
        if order is not None:
            check(order.store_digest, order.digest, self.source.uri(plan.source_key))
            proof.algorithm = order.store_digest.algorithm
        return moved_bytes

    def _give_up(self, order: InOrder | None, under_way: list[Future[None]]) -> None:
        """Cancel the running parts of the object, and wait until their threads have stopped."""
        self._over.set()
        if order is not None:
            order.end()
        for brought in under_way:
            brought.cancel()
        wait(under_way)

    def _part(self, plan: CopyPlan, fetch: Fetch, number: int) -> bytearray:
        body = bytearray(_size(plan, number))
        if fetch(memoryview(body), plan.span(number)[0]) != len(body):
            raise ChangedObject(plan.source_key)
        return body

    def _draw(self, size_bytes: int) -> None:
        if self._over.is_set():
            raise CopyFailed("cancelled, because another part or object of the copy failed")
        if self._share is not None:
            self._share.draw(size_bytes)

    def _check_unchanged(self, plan: CopyPlan) -> None:
        now = self.source.stat(plan.source_key)
        if now is None or now.tag != plan.source_tag:
            raise ChangedObject(plan.source_key)

    def _difference(self, plan: CopyPlan) -> str | None:
        """Read source and target and describe the first difference; None if they are equal.

        Raises:
            DamagedSource: the bytes read from the source do not match its store's digest.
        """
        found = self.target.stat(plan.key)
        if found is None or found.size_bytes != plan.size_bytes:
            return f"{found and found.size_bytes} bytes at the target, {plan.size_bytes} in the source"
        algorithm = checksums.fastest()
        store_digest = self.source.store_digest(_version(plan))
        digest = digest_of(store_digest) if store_digest else None
        with self.source.opened(plan.source_key) as fetch, self.target.opened(plan.key) as fetch_back:
            for number in range(plan.parts):
                self._draw(_size(plan, number))
                part = self._part(plan, fetch, number)
                if digest is not None:
                    digest.update(part)
                expected = checksums.checksum(algorithm, [part])
                body = aligned(len(part))
                got = checksums.checksum(algorithm, [body[: fetch_back(body, plan.span(number)[0])]])
                if got != expected:
                    return f"part {number + 1} of {plan.parts} is {got} at the target, {expected} in the source"
        if store_digest and digest is not None:
            check(store_digest, digest, self.source.uri(plan.source_key))
        return None


class _Proof:
    """Records which digests the bytes read from an object were compared with."""

    def __init__(self, checksum: str | None) -> None:
        self.algorithm = ""
        """Algorithm of the source store's digest, if it matched."""
        self.has_checksum = False
        """Whether the bytes match the caller's checksum."""
        self._checksum = checksum

    def judge(self, body: bytearray, store_digest: StoreDigest | None, plan: CopyPlan) -> None:
        """Compare a complete object with the store's digest and the caller's checksum.

        Raises:
            DamagedSource: one of them does not match.
        """
        if store_digest is not None:
            digest = digest_of(store_digest)
            digest.update(body)
            check(store_digest, digest, plan.source.uri(plan.source_key))
            self.algorithm = store_digest.algorithm
        if self._checksum is not None:
            found = checksums.checksum(self._checksum.partition(":")[0], [body])
            if found != self._checksum:
                raise DamagedSource(f"{plan.source.uri(plan.source_key)}: {found}, expected {self._checksum}")
            self.has_checksum = True


def _version(plan: CopyPlan) -> ObjectInfo:
    return ObjectInfo(plan.source_key, plan.size_bytes, plan.source_tag)


def _size(plan: CopyPlan, number: int) -> int:
    start, end = plan.span(number)
    return end - start


def _changed(plan: CopyPlan) -> CopyFailed:
    return CopyFailed(f"{plan.source.uri(plan.source_key)} changed while it was copied")
