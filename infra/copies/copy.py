"""Copies objects between stores: in parts, verified, and resumable after an interruption."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeAlias

from infra.copies.bandwidth import BandwidthShare
from infra.copies.errors import CopyFailed, CopyInUse, DamagedSource
from infra.copies.transfer import Moving, Progress
from infra.copies.uploads import CopyStore
from mizzen.objects.store import MissingObject, ObjectInfo
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
"""Objects that are looked up together: as many as S3 lists in one request."""
_Looked: TypeAlias = dict[str, ObjectInfo | None]


@dataclass(frozen=True)
class Copied:
    """The result of a copy: an object that is complete at the target."""

    key: str
    size_bytes: int
    moved_bytes: int
    """Bytes that this call transferred."""
    verified: str
    """Algorithm of the digest that the content was compared with: the caller's checksum, or the digest of the source
    store. Empty if there is neither, as for folders: then the bytes read from the source are unverified."""


@dataclass(frozen=True)
class Wanted:
    """An object to copy."""

    key: str
    size_bytes: int
    checksum: str | None = None
    """`algorithm:hex` of the content, if known."""


def copy_prefix(
    source: CopyStore,
    target: CopyStore,
    prefix: str,
    *,
    name: str,
    share: BandwidthShare | None = None,
    progress: Progress | None = None,
    copied: Callable[[Copied], object] | None = None,
) -> int:
    """Copy all objects whose keys start with `prefix`. See `copy_objects`."""
    wanted = [Wanted(info.key, info.size_bytes) for info in source.list(prefix)]
    return copy_objects(source, target, wanted, name=name, share=share, progress=progress, copied=copied)


def copy_objects(
    source: CopyStore,
    target: CopyStore,
    objects: Sequence[Wanted],
    *,
    name: str,
    share: BandwidthShare | None = None,
    progress: Progress | None = None,
    copied: Callable[[Copied], object] | None = None,
) -> int:
    """Copy objects, each under the same key, and return their total size in bytes, including existing copies.

    Small objects (one part) are copied concurrently. Larger objects are copied one after the other, each with several
    concurrent parts. `progress` is called after each part of a large object and after each object; `copied` is called
    with the result of each object. Both are called in the caller's thread; an exception from them ends the copy. See
    `copy_object` for the rest.

    Raises:
        MissingObject, CopyFailed, CopyInUse: see `copy_object`. Objects that were already copied stay.
    """
    total_bytes = sum(wanted.size_bytes for wanted in objects)
    done_bytes = 0
    under_way: deque[Future[Copied]] = deque()

    def told(bytes_now: int) -> None:
        # Completion is reported only when all names are durable.
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
            # A large object uses all threads for its parts.
            while under_way:
                ended(under_way.popleft().result())
            # Until this object is finished, `done_bytes` counts only the objects before it.
            ended(_copy(moving, wanted, wanted.key, here, there, lambda part_bytes, _: told(done_bytes + part_bytes)))
        while under_way:
            ended(under_way.popleft().result())
    target.make_durable(wanted.key for wanted in objects)
    if progress is not None and objects:
        progress(total_bytes, total_bytes)
    return done_bytes


def copy_object(
    source: CopyStore,
    target: CopyStore,
    key: str,
    *,
    name: str,
    to: str | None = None,
    size_bytes: int | None = None,
    checksum: str | None = None,
    part_bytes: int = PART_BYTES,
    share: BandwidthShare | None = None,
    progress: Progress | None = None,
) -> Copied:
    """Copy an object to the key `to` (None: the same key). It appears there complete and verified, or not at all.

    The bytes read are compared with the digest that the source store publishes, if there is one, and with `checksum`
    (`algorithm:hex` of the content), if given; `Copied.verified` names the digest that was used. An interrupted copy
    resumes if this function is called again with the same `name` for the same version of the object. An existing, equal
    object is not copied again. Every transferred byte counts against `share`. Parts have `part_bytes`, or more if there
    would be too many parts.

    Raises:
        MissingObject: there is no such object.
        CopyFailed: the object has another size than expected, it changed during the copy, or the copy differs from it.
        DamagedSource: the bytes read do not match the store's digest or `checksum`; a subclass of `CopyFailed`.
        CopyInUse: another process is making the same copy.
        Exception: an error of a store.
    """
    if part_bytes <= 0:
        raise ValueError(f"part_bytes={part_bytes!r}: must be at least 1")
    here = _here(source, key)
    wanted = Wanted(key, here.size_bytes if size_bytes is None else size_bytes, checksum)
    with Moving(source, target, name, part_bytes, share) as moving:
        copied = _copy(moving, wanted, to or key, here, None, progress)
    target.make_durable([copied.key])
    if progress is not None:
        progress(copied.size_bytes, copied.size_bytes)
    return copied


def _looked_up(
    source: CopyStore, target: CopyStore, objects: Sequence[Wanted]
) -> Iterator[tuple[Wanted, ObjectInfo | None, bool | None]]:
    """Yield each object, its entry in the source if known, and whether the target may have it (None if unknown)."""
    for start in range(0, len(objects), _LOOKED_UP):
        some = objects[start : start + _LOOKED_UP]
        keys = [wanted.key for wanted in some]
        here, there = source.stat_all(keys), target.stat_all(keys)
        for wanted in some:
            found = there.get(wanted.key)
            is_there = found is not None and found.size_bytes == wanted.size_bytes if wanted.key in there else None
            yield wanted, here.get(wanted.key), is_there


def _here(source: CopyStore, key: str) -> ObjectInfo:
    found = source.stat(key)
    if found is None:
        raise MissingObject(f"no object {key!r} at {source.uri('')}")
    return found


def _copy(
    moving: Moving,
    wanted: Wanted,
    to: str,
    here: ObjectInfo | None,
    there: bool | None,
    progress: Callable[[int, int], None] | None = None,
) -> Copied:
    """Copy one object; its name is not durable yet. `here` and `there` are the values of `_looked_up`."""
    here = here or _here(moving.source, wanted.key)
    if here.size_bytes != wanted.size_bytes:
        message = f"{here.size_bytes} bytes, expected {wanted.size_bytes}"
        raise CopyFailed(f"{wanted.key}: changed in the source, {moving.source.uri(wanted.key)}: {message}")
    plan = moving.plan(here, to)
    if there is not False and moving.is_there(plan, wanted.checksum):
        return Copied(to, here.size_bytes, 0, moving.algorithm(plan, wanted.checksum))
    moved_bytes, verified = moving.move(plan, wanted.checksum, progress)
    return Copied(to, here.size_bytes, moved_bytes, verified)
