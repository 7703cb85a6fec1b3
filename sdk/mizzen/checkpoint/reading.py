"""Reading a root. Nothing here changes it, and nothing that is not committed is looked at."""

import os
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar, cast

from mizzen.checkpoint import parts
from mizzen.checkpoint.errors import CheckpointError, CheckpointWarning, CorruptCheckpointError
from mizzen.checkpoint.fetching import fetch_part, fetch_tensors, verify_part
from mizzen.checkpoint.live import Live
from mizzen.checkpoint.log import Log, readable
from mizzen.checkpoint.manifest import Manifest, Part
from mizzen.checkpoint.roots import open_root
from mizzen.checkpoint.tensorfile import TensorEntry
from mizzen.objects.store import ObjectStore

_RELISTS = 5

T = TypeVar("T")
GetLive: TypeAlias = Callable[[Collection[str]], Live]


@dataclass(frozen=True)
class Checkpoint:
    """A loaded checkpoint."""

    manifest: Manifest
    state: dict[str, Any]
    """Part name to value: the parts of all ranks and of this one."""

    @property
    def step(self) -> int:
        """The step whose state it is."""
        return self.manifest.step

    @property
    def attempt(self) -> int:
        """The attempt that wrote it."""
        return self.manifest.attempt


@dataclass(frozen=True)
class Skipped:
    """A checkpoint that was passed over, and why."""

    name: str
    reason: str


@dataclass(frozen=True)
class Reader:
    """Who loads, and how far what was saved is trusted."""

    rank: int = 0
    world_size: int = 1
    trusted: bool = False
    """Whether pickles may be loaded, which can run any code."""
    other_world: bool = False
    """Whether a checkpoint of a gang of another size may be loaded: without any rank's own parts."""
    start_over: bool = False
    """Whether there may be checkpoints of which none can be loaded: then none is."""
    agree: Callable[[int], int] | None = None
    """The maximum over all ranks, which all call together. Without it each rank verifies the parts of all ranks."""


def read_latest(
    logs: Sequence[Log], reader: Reader, live: GetLive = lambda _: {}
) -> tuple[Checkpoint | None, tuple[Skipped, ...]]:
    """The newest valid checkpoint in any of the roots, if any, and what was passed over, each with a warning.

    `live` gives, for the names of a checkpoint's parts, tensors that are read into where the checkpoint has them in the
    same form: they are what comes back. Where this raises, they may hold parts of what was passed over. A reader that
    would start over needs them as they are, so they are left alone.

    Of one that several roots have, the first root's is tried first. A damaged part is no loss where another checkpoint
    has the same content elsewhere.

    Raises:
        CheckpointError: something cannot be read for another reason than being damaged, or is not for this reader; or
            there are checkpoints and none is valid, and the reader would not start over.
    """
    for _ in range(_RELISTS):
        for log in logs:
            log.refresh()
        found, skipped, outrun = _newest(logs, reader, (lambda _: {}) if reader.start_over else live)
        if not outrun:
            for entry in skipped:
                message = f"checkpoint {entry.name} is passed over: {entry.reason}"
                warnings.warn(message, CheckpointWarning, stacklevel=4)
            if found is None and skipped and not reader.start_over:
                raise CheckpointError(
                    f"{logs[-1].where}: none of {len(skipped)} checkpoints or records can be loaded; the newest: "
                    f"{skipped[0].name}: {skipped[0].reason}. To begin without them, pass start_over=True"
                )
            return found, skipped
    raise CheckpointError(
        f"{logs[0].where}: checkpoints were removed faster than they could be read; keep more of them"
    )


def _newest(logs: Sequence[Log], reader: Reader, live: GetLive) -> tuple[Checkpoint | None, tuple[Skipped, ...], bool]:
    """As `read_latest`; and whether one was removed while it was read."""
    skipped = [
        Skipped(f"{log.where}/log, record {entry.number}", entry.reason)
        for log in logs
        for entry in log.entries
        if entry.record is None and all(number < entry.number for number, _ in log.checkpoints)
    ]
    candidates = [
        (manifest, -order, number, log) for order, log in enumerate(logs) for number, manifest in log.checkpoints
    ]
    copies = _copies(logs)
    for manifest, _, number, log in sorted(candidates, key=lambda found: (found[0].id, *found[1:3]), reverse=True):
        state, error = None, None
        try:
            state = _load(log.store, manifest, reader, copies, live)
        except CorruptCheckpointError as corrupt:
            error = corrupt
        if reader.agree is not None and reader.agree(int(error is not None)) and error is None:
            error = CorruptCheckpointError("another rank cannot load its parts")
        if error is None and state is not None:
            return Checkpoint(manifest, state), tuple(skipped), False
        log.refresh()
        if reader.agree is None and number not in {n for n, _ in log.checkpoints}:
            return None, (), True
        skipped.append(Skipped(f"{log.where} {manifest.name}", str(error)))
    return None, tuple(skipped), False


_Copies = Mapping[tuple[str, int], Sequence[tuple[ObjectStore, str]]]
"""Checksum and size of a part to the places where it is."""


def _copies(logs: Sequence[Log]) -> _Copies:
    found: dict[tuple[str, int], dict[tuple[str, str], tuple[ObjectStore, str]]] = {}
    for log in logs:
        for _, manifest in log.checkpoints:
            for part in manifest.parts:
                found.setdefault((part.checksum, part.size_bytes), {})[log.where, part.key] = log.store, part.key
    return {content: tuple(places.values()) for content, places in found.items()}


def _fetch(store: ObjectStore, part: Part, copies: _Copies, fetch: Callable[[ObjectStore, Part], T]) -> T:
    """A part by `fetch`, from where the manifest says or, with a warning, from another copy.

    Raises:
        CorruptCheckpointError: all copies are missing or damaged; the message is that of the first.
        CheckpointError: one cannot be read for another reason.
    """
    try:
        return fetch(store, part)
    except CorruptCheckpointError as error:
        for other, key in copies.get((part.checksum, part.size_bytes), ()):
            if other.uri(key) != store.uri(part.key):
                with suppress(CorruptCheckpointError):
                    content = fetch(other, replace(part, key=key))
                    message = f"{store.uri('')}: {error}; read from {other.uri(key)}, which has the same content"
                    warnings.warn(message, CheckpointWarning, stacklevel=7)
                    return content
        raise


def _load(store: ObjectStore, manifest: Manifest, reader: Reader, copies: _Copies, live: GetLive) -> dict[str, Any]:
    """The values of the parts that are this reader's, after all that make the checkpoint valid are verified."""
    foreign = manifest.world_size != reader.world_size and any(part.rank is not None for part in manifest.parts)
    if foreign and not reader.other_world:
        raise CheckpointError(
            f"{store.uri('')} {manifest.name} has parts of each of {manifest.world_size} ranks, and this gang has "
            f"{reader.world_size}: give other_world=True to load it without them"
        )
    mine = manifest.parts_of(-1 if foreign else reader.rank)
    if reader.agree is None:
        for part in manifest.parts:
            if part not in mine:
                _fetch(store, part, copies, verify_part)
    state: dict[str, Any] = {}
    targets = live({part.name for part in mine})
    for part in mine:
        wanted = targets.get(part.name, {})
        read: dict[str, Any] = {}

        def target(entry: TensorEntry, wanted: Any = wanted, read: dict[str, Any] = read) -> memoryview | None:
            found = wanted.get(entry.name)
            if found is None or not found.fits(entry):
                return None
            read[entry.name] = found.value
            return cast(memoryview, found.memory)

        def fetch(store: ObjectStore, part: Part, target: Any = target) -> Any:
            return fetch_tensors(store, part, target) if part.kind == "tensors" else fetch_part(store, part)

        content = _fetch(store, part, copies, fetch)
        try:
            state[part.name] = parts.decode(part.kind, content, reader.trusted, name=part.name, live=read)
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(f"{part.key}: {error}") from error
    return state


def list_committed(root: str | os.PathLike[str] | ObjectStore, *, verify: bool = False) -> list[Manifest]:
    """The valid checkpoints in `root` (a path, a URI, or a store), newest first; none if nothing is there.

    Valid: its record matches its checksum, and every part of every rank is there in its size; with `verify`, each
    part's checksum is computed too. Changes nothing and needs no claim: it is how an observer, such as the scheduler,
    looks at a root.

    Raises:
        ValueError: `root` is no root's address.
        CheckpointError: something cannot be read for another reason than being damaged.
    """
    store = open_root(root) if isinstance(root, str | os.PathLike) else root
    log = Log(store)
    for _ in range(_RELISTS):
        log.refresh()
        with readable(f"{log.where}/parts"):
            sizes = {info.key: info.size_bytes for info in store.list("parts/")} if log.checkpoints else {}
        found = [manifest for _, manifest in log.checkpoints if _whole(store, manifest.parts, sizes, verify)]
        before = [number for number, _ in log.checkpoints]
        if len(found) == len(before):
            return found
        log.refresh()
        if {number for number, _ in log.checkpoints} >= set(before):
            return found
        # A writer committed a newer one and removed an old one meanwhile: look again.
    raise _outrun(log)


def _outrun(log: Log) -> CheckpointError:
    return CheckpointError(f"{log.where}: checkpoints were removed faster than they could be read; keep more of them")


def _whole(store: ObjectStore, wanted: Iterable[Part], sizes: dict[str, int], verify: bool) -> bool:
    for part in wanted:
        if sizes.get(part.key) != part.size_bytes:
            return False
        if verify:
            try:
                verify_part(store, part)
            except CorruptCheckpointError:
                return False
    return True


def load_one(store: ObjectStore, manifest: Manifest, reader: Reader) -> Checkpoint:
    """Load this committed checkpoint, whether it is the newest or not. A damaged part is read from another copy.

    Raises:
        CorruptCheckpointError: a part is missing or damaged, and no other checkpoint has the same content.
        CheckpointError: a part cannot be read for another reason, or the checkpoint is not for this reader.
    """
    log = Log(store)
    log.refresh()
    return Checkpoint(manifest, _load(store, manifest, reader, _copies([log]), lambda _: {}))
