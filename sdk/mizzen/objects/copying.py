"""Copying objects from one store to another: part by part, verified, and taken up again where it stopped."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import TypeAlias

from mizzen.objects import checksums
from mizzen.objects.bandwidth import Share
from mizzen.objects.store import Fetch, MissingObject, ObjectStore
from mizzen.objects.uploads import CopyFailed, CopyInUse, Plan
from mizzen.objects.workers import Workers

__all__ = ["PART_BYTES", "Copied", "CopyFailed", "CopyInUse", "Wanted", "copy_object", "copy_objects", "copy_prefix"]

PART_BYTES = 16 << 20
_MOST_PARTS = 10_000
"""S3 takes no more."""
_AT_ONCE = 4
_HELD_BYTES = 256 << 20
"""Parts that are in memory at the same time have no more together, if they are larger than usual."""

Progress: TypeAlias = Callable[[int, int], None]
"""Is told bytes done and bytes in total."""


@dataclass(frozen=True)
class Copied:
    """An object that is whole at the target."""

    key: str
    size_bytes: int
    moved_bytes: int
    """What was not there before this call."""


@dataclass(frozen=True)
class Wanted:
    """An object that is to be copied."""

    key: str
    size_bytes: int
    checksum: str | None = None
    """`algorithm:hex` of its content, if it is known."""


def copy_prefix(
    source: ObjectStore,
    target: ObjectStore,
    prefix: str,
    *,
    name: str,
    share: Share | None = None,
    progress: Progress | None = None,
) -> int:
    """Copy all objects under `prefix`: see `copy_objects`."""
    wanted = [Wanted(info.key, info.size_bytes) for info in source.list(prefix)]
    return copy_objects(source, target, wanted, name=name, share=share, progress=progress)


def copy_objects(
    source: ObjectStore,
    target: ObjectStore,
    objects: Sequence[Wanted],
    *,
    name: str,
    share: Share | None = None,
    progress: Progress | None = None,
) -> int:
    """Copy these objects, one by one, each under its key; returns their bytes, those included that were there already.

    `progress` is called after each part, and after each object when it is verified. See `copy_object` for the rest.

    Raises:
        MissingObject, CopyFailed, CopyInUse: see `copy_object`.
    """
    total_bytes = sum(wanted.size_bytes for wanted in objects)
    done_bytes = 0
    for wanted in objects:

        def show(part_bytes: int, _: int, done_bytes: int = done_bytes) -> None:
            if progress is not None:
                progress(done_bytes + part_bytes, total_bytes)

        size_bytes, checksum = wanted.size_bytes, wanted.checksum
        copy_object(
            source, target, wanted.key, name=name, size_bytes=size_bytes, checksum=checksum, share=share, progress=show
        )
        done_bytes += wanted.size_bytes
    return done_bytes


def copy_object(
    source: ObjectStore,
    target: ObjectStore,
    key: str,
    *,
    name: str,
    to: str | None = None,
    size_bytes: int | None = None,
    checksum: str | None = None,
    part_bytes: int = PART_BYTES,
    share: Share | None = None,
    progress: Progress | None = None,
) -> Copied:
    """Copy an object to `to` (None: under its own key): it appears there whole and verified, or not at all.

    A copy that was interrupted goes on behind the parts that are at the target if it is asked for again under the same
    `name`, of the same version of the object. What is there already is not copied again. `checksum`, if
    given (`algorithm:hex` of the content), is compared with what can be read back. Bytes are drawn from `share` before
    they are moved. Parts have `part_bytes`, or more where there would be too many.

    Raises:
        MissingObject: there is no such object.
        CopyFailed: the object has another size, it changed meanwhile, or the target's content is not the source's.
        CopyInUse: another process makes the same copy at this moment.
        Exception: the stores' own.
    """
    found = source.stat(key)
    if found is None:
        raise MissingObject(f"no object {key!r} at {source.uri('')}")
    if size_bytes not in (None, found.size_bytes):
        message = f"{found.size_bytes} bytes, {size_bytes} were expected"
        raise CopyFailed(f"{key}: changed in the source, {source.uri(key)}: {message}")
    if part_bytes <= 0:
        raise ValueError(f"part_bytes={part_bytes!r}: must be at least 1")
    to = to or key
    part_bytes = max(part_bytes, -(-found.size_bytes // _MOST_PARTS))
    identity = "\0".join((name, source.uri(key), found.tag, to, str(part_bytes)))
    mark = sha256(identity.encode()).hexdigest()[:32]
    plan = Plan(source, key, found.tag, found.size_bytes, to, part_bytes, mark)
    moved_bytes = 0
    if not _there(target, plan, checksum, share):
        moved_bytes = _move(target, plan, checksum, share, progress)
    if progress is not None:
        progress(found.size_bytes, found.size_bytes)
    return Copied(to, found.size_bytes, moved_bytes)


def _there(target: ObjectStore, plan: Plan, checksum: str | None, share: Share | None) -> bool:
    found = target.stat(plan.key)
    if found is None or found.size_bytes != plan.size_bytes:
        return False
    if checksum is not None:
        return _checksum(target, plan, checksum) == checksum
    return found.mark == plan.mark or _difference(target, plan, share) is None


def _move(target: ObjectStore, plan: Plan, checksum: str | None, share: Share | None, progress: Progress | None) -> int:
    """Bring the parts that are missing, make the object of them, and verify it; returns the bytes that were missing."""
    with target.upload(plan) as upload:
        plan = upload.plan
        missing = upload.missing()
        sizes = {number: end - start for number in missing for start, end in [plan.span(number)]}
        moved_bytes = sum(sizes.values())
        done_bytes = plan.size_bytes - moved_bytes
        at_once = max(1, min(_AT_ONCE, _HELD_BYTES // plan.part_bytes))
        with plan.source.opened(plan.source_key) as fetch, Workers(at_once) as workers:

            def take(number: int) -> None:
                if share is not None:
                    share.draw(sizes[number])
                upload.take(number, lambda: _read(plan, fetch, number))

            for number, taken in [(number, workers.submit(take, number)) for number in missing]:
                taken.result()
                done_bytes += sizes[number]
                if progress is not None and done_bytes < plan.size_bytes:
                    progress(done_bytes, plan.size_bytes)
        now = plan.source.stat(plan.source_key)
        if now is None or now.tag != plan.source_tag:
            upload.drop()
            raise _changed(plan)
        vouched = upload.finish()
    difference = _size_difference(target, plan)
    if difference is None and not vouched:
        difference = _difference(target, plan, share)
    if difference is None and checksum is not None and (found := _checksum(target, plan, checksum)) != checksum:
        difference = f"{found} at the target, it should be {checksum}"
    if difference is not None:
        target.delete(plan.key)
        raise CopyFailed(f"{plan.key}: {difference}")
    return moved_bytes


def _read(plan: Plan, fetch: Fetch, number: int) -> bytearray:
    start, end = plan.span(number)
    body = bytearray(end - start)
    if fetch(memoryview(body), start) != len(body):
        raise _changed(plan)
    return body


def _changed(plan: Plan) -> CopyFailed:
    return CopyFailed(f"{plan.source.uri(plan.source_key)} changed while it was copied")


def _size_difference(target: ObjectStore, plan: Plan) -> str | None:
    if (found_bytes := target.size(plan.key)) == plan.size_bytes:
        return None
    return f"{found_bytes} bytes at the target, {plan.size_bytes} in the source"


def _difference(target: ObjectStore, plan: Plan, share: Share | None) -> str | None:
    """Where source and target, both read, are not the same; None: they are."""
    algorithm = checksums.fastest()
    with plan.source.opened(plan.source_key) as fetch, target.opened(plan.key) as fetch_back:
        for number in range(plan.parts):
            start, end = plan.span(number)
            if share is not None:
                share.draw(end - start)
            expected = checksums.checksum(algorithm, [_read(plan, fetch, number)])
            body = memoryview(bytearray(end - start))
            found = checksums.checksum(algorithm, [body[: fetch_back(body, start)]])
            if found != expected:
                return f"part {number + 1} of {plan.parts} is {found} at the target, {expected} in the source"
    return None


def _checksum(target: ObjectStore, plan: Plan, like: str) -> str:
    """The checksum of the target's content, by the algorithm of another one."""
    algorithm, _, _ = like.partition(":")
    digest = checksums.digest(algorithm)
    body = memoryview(bytearray(min(PART_BYTES, plan.size_bytes)))
    with target.opened(plan.key) as fetch:
        at = 0
        while at < plan.size_bytes and (count := fetch(body[: plan.size_bytes - at], at)):
            digest.update(body[:count])
            at += count
    return f"{algorithm}:{digest.hexdigest()}"
