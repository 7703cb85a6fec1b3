"""Copying objects from one store to another: part by part, verified, and taken up again where it stopped."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeAlias

from mizzen.objects.bandwidth import Share
from mizzen.objects.moving import Moving, Progress
from mizzen.objects.store import MissingObject, ObjectInfo, ObjectStore
from mizzen.objects.uploads import CopyFailed, CopyInUse, DamagedSource
from mizzen.objects.workers import AT_ONCE

__all__ = [
    "PART_BYTES",
    "Copied",
    "CopyFailed",
    "CopyInUse",
    "DamagedSource",
    "Progress",
    "Wanted",
    "copy_object",
    "copy_objects",
    "copy_prefix",
]

PART_BYTES = 16 << 20
_LOOKED_UP = 1000
"""Objects whose presence is looked up together: as many as S3 lists in one request."""
_Looked: TypeAlias = dict[str, ObjectInfo | None]


@dataclass(frozen=True)
class Copied:
    """An object that is whole at the target."""

    key: str
    size_bytes: int
    moved_bytes: int
    """What was not there before this call."""
    verified: str
    """The algorithm of the digest that the content was compared with: the caller's, or that of the source's store.
    Empty: the source vouches for nothing, as folders do, so what was read from it is unverified."""


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
    copied: Callable[[Copied], object] | None = None,
) -> int:
    """Copy all objects under `prefix`: see `copy_objects`."""
    wanted = [Wanted(info.key, info.size_bytes) for info in source.list(prefix)]
    return copy_objects(source, target, wanted, name=name, share=share, progress=progress, copied=copied)


def copy_objects(
    source: ObjectStore,
    target: ObjectStore,
    objects: Sequence[Wanted],
    *,
    name: str,
    share: Share | None = None,
    progress: Progress | None = None,
    copied: Callable[[Copied], object] | None = None,
) -> int:
    """Copy these objects, each under its key; returns their bytes, those included that were there already.

    Small objects (of one part) are copied several at a time, others one by one, several parts at a time. `progress` is
    called after each part of a large object, and for each object when it is verified; `copied` is told of each object
    when it is whole, and how it was verified. Both are called by the caller's thread, and end the copy by raising. See
    `copy_object` for the rest.

    Raises:
        MissingObject, CopyFailed, CopyInUse: see `copy_object`. What was copied before stays.
    """
    total_bytes = sum(wanted.size_bytes for wanted in objects)
    done_bytes = 0
    under_way: deque[Future[Copied]] = deque()

    def told(bytes_now: int) -> None:
        # The end is told when all names are durable.
        if progress is not None and bytes_now < total_bytes:
            progress(bytes_now, total_bytes)

    def ended(one: Copied) -> None:
        nonlocal done_bytes
        done_bytes += one.size_bytes
        if copied is not None:
            copied(one)
        told(done_bytes)

    with Moving(source, target, name, PART_BYTES, share) as moving:
        for wanted, here, there in _looked_up(source, target, objects):
            if wanted.size_bytes <= PART_BYTES:
                under_way.append(moving.workers.submit(_copy, moving, wanted, wanted.key, here, there))
                while len(under_way) > 2 * AT_ONCE or (under_way and under_way[0].done()):
                    ended(under_way.popleft().result())
                continue
            # A large object has all threads for its parts.
            while under_way:
                ended(under_way.popleft().result())
            # Until it ends, `done_bytes` is what was done before.
            ended(_copy(moving, wanted, wanted.key, here, there, lambda part_bytes, _: told(done_bytes + part_bytes)))
        while under_way:
            ended(under_way.popleft().result())
    target.settle(wanted.key for wanted in objects)
    if progress is not None and objects:
        progress(total_bytes, total_bytes)
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

    What is read is compared with the digest that the source's store has of the object, if there is one, and with
    `checksum`, if it is given (`algorithm:hex` of the content); `Copied.verified` says which it was. A copy that was
    interrupted goes on behind the parts that are at the target if it is asked for again under the same `name`, of the
    same version of the object. What is there already is not copied again. Bytes are drawn from `share` before they are
    moved. Parts have `part_bytes`, or more where there would be too many.

    Raises:
        MissingObject: there is no such object.
        CopyFailed: the object has another size, it changed meanwhile, or the target's content is not the source's.
        DamagedSource: what was read does not have the store's digest or `checksum`; a kind of `CopyFailed`.
        CopyInUse: another process makes the same copy at this moment.
        Exception: the stores' own.
    """
    if part_bytes <= 0:
        raise ValueError(f"part_bytes={part_bytes!r}: must be at least 1")
    here = _here(source, key)
    wanted = Wanted(key, here.size_bytes if size_bytes is None else size_bytes, checksum)
    with Moving(source, target, name, part_bytes, share) as moving:
        copied = _copy(moving, wanted, to or key, here, None, progress)
    target.settle([copied.key])
    if progress is not None:
        progress(copied.size_bytes, copied.size_bytes)
    return copied


def _looked_up(
    source: ObjectStore, target: ObjectStore, objects: Sequence[Wanted]
) -> Iterator[tuple[Wanted, ObjectInfo | None, bool | None]]:
    """Each object, with what is known of it in the source, and whether the target may have it (None: not known)."""
    for start in range(0, len(objects), _LOOKED_UP):
        some = objects[start : start + _LOOKED_UP]
        keys = [wanted.key for wanted in some]
        here, there = source.look(keys), target.look(keys)
        for wanted in some:
            found = there.get(wanted.key)
            is_there = found is not None and found.size_bytes == wanted.size_bytes if wanted.key in there else None
            yield wanted, here.get(wanted.key), is_there


def _here(source: ObjectStore, key: str) -> ObjectInfo:
    found = source.stat(key)
    if found is None:
        raise MissingObject(f"no object {key!r} at {source.uri('')}")
    return ObjectInfo(key, found.size_bytes, found.tag)


def _copy(
    moving: Moving,
    wanted: Wanted,
    to: str,
    here: ObjectInfo | None,
    there: bool | None,
    progress: Callable[[int, int], None] | None = None,
) -> Copied:
    """One object, as far as its name, which is not durable yet. `here` and `there`: see `_looked_up`."""
    here = here or _here(moving.source, wanted.key)
    if here.size_bytes != wanted.size_bytes:
        message = f"{here.size_bytes} bytes, {wanted.size_bytes} were expected"
        raise CopyFailed(f"{wanted.key}: changed in the source, {moving.source.uri(wanted.key)}: {message}")
    plan = moving.plan(here, to)
    if there is not False and moving.is_there(plan, wanted.checksum):
        return Copied(to, here.size_bytes, 0, moving.algorithm(plan, wanted.checksum))
    moved_bytes, verified = moving.move(plan, wanted.checksum, progress)
    return Copied(to, here.size_bytes, moved_bytes, verified)
