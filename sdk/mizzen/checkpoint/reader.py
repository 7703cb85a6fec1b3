"""Loads the committed checkpoints of a root. Read-only."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from mizzen.checkpoint import parts
from mizzen.checkpoint.attributes import ATTRIBUTES
from mizzen.checkpoint.errors import CheckpointError, CheckpointWarning, CorruptCheckpointError
from mizzen.checkpoint.log import Log
from mizzen.checkpoint.lost_records import check_not_lost
from mizzen.checkpoint.manifest import Manifest, Part
from mizzen.checkpoint.module_layout import ModuleLayout
from mizzen.checkpoint.part_reader import fetch_part, fetch_tensors, verify_part
from mizzen.checkpoint.verified_part import VerifiedPart, verified_part
from mizzen.objects.store import ObjectStore

_RELISTS = 5
_TOLD = 5
"""Number of attributes that a warning names."""

T = TypeVar("T")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was loaded: its manifest, and the state."""

    manifest: Manifest
    state: dict[str, Any]
    """Part name to value: the shared parts and the parts of the rank that loaded."""
    verified: frozenset[str] = frozenset()
    """URIs of the parts whose stored content was read and equals its checksum."""

    @property
    def step(self) -> int:
        """The step whose state this is."""
        return self.manifest.step

    @property
    def attempt(self) -> int:
        """The attempt that committed the checkpoint."""
        return self.manifest.attempt


class Skipped(NamedTuple):
    """A checkpoint that was skipped, and the reason."""

    name: str
    reason: str
    is_volatile: bool = False
    """Whether it was in the memory tier."""


@dataclass(frozen=True)
class Reader:
    """The rank that loads, and the restrictions on what it loads."""

    rank: int = 0
    world_size: int = 1
    trusted: bool = False
    """Whether pickles may be loaded. Loading a pickle can run any code."""
    other_world: bool = False
    """Whether a checkpoint of a gang of another size may be loaded, without the parts that belong to single ranks."""
    start_over: bool = False
    """Whether to return no checkpoint, instead of an error, if checkpoints exist but none can be loaded."""
    agree: Callable[[int], int] | None = None
    """Returns the maximum over all ranks, which call it together. Without it each rank verifies all ranks' parts."""


def read_latest(
    logs: Sequence[Log], reader: Reader, layouts: Mapping[str, ModuleLayout]
) -> tuple[Checkpoint | None, tuple[Skipped, ...]]:
    """Load the newest valid checkpoint of the roots. Return it, or None, and the skipped ones, each with a warning.

    `layouts` maps part names to the layouts of live modules. If a part has the layout of its module, the result holds a
    `VerifiedPart` instead of the state: nothing live is changed before all parts are verified.

    If several roots have the same checkpoint, the first root is tried first. A damaged part is read from another
    checkpoint or root that has the same content.

    Raises:
        CheckpointError: a file or object cannot be read for a reason other than damage, or the reader may not load it.
            Or checkpoints exist, none is valid, and `start_over` is not set.
    """
    for _ in range(_RELISTS):
        for log in logs:
            log.refresh()
        found, skipped, outrun = _newest(logs, reader, layouts)
        if not outrun:
            for entry in skipped:
                message = f"checkpoint {entry.name} is skipped: {entry.reason}"
                warnings.warn(message, CheckpointWarning, stacklevel=4)
            if found is None and not reader.start_over:
                # Without the memory tier: it loses checkpoints by design, and the bucket decides.
                lost = [one for one in skipped if not one.is_volatile]
                if lost:
                    raise CheckpointError(
                        f"{logs[-1].where}: none of {len(lost)} checkpoints or records can be loaded; the newest: "
                        f"{lost[0].name}: {lost[0].reason}. To start without a checkpoint, pass "
                        "settings=CheckpointSettings(start_over=True)"
                    )
                check_not_lost(logs)
            return found, skipped
    raise CheckpointError(f"{logs[0].where}: checkpoints were removed faster than they could be read; increase keep")


def _newest(
    logs: Sequence[Log], reader: Reader, layouts: Mapping[str, ModuleLayout]
) -> tuple[Checkpoint | None, tuple[Skipped, ...], bool]:
    """See `read_latest`. The last value says whether a checkpoint was removed while it was read."""
    skipped = [
        Skipped(f"{log.where}/log, record {entry.number}", entry.reason, log.store.is_volatile)
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
        verified: set[str] = set()
        try:
            state = _load(log.store, manifest, reader, copies, layouts, verified)
        except CorruptCheckpointError as corrupt:
            error = corrupt
        if reader.agree is not None and reader.agree(int(error is not None)) and error is None:
            error = CorruptCheckpointError("another rank cannot load its parts")
        if error is None and state is not None:
            return Checkpoint(manifest, state, frozenset(verified)), tuple(skipped), False
        log.refresh()
        if reader.agree is None and number not in {n for n, _ in log.checkpoints}:
            return None, (), True
        skipped.append(Skipped(f"{log.where} {manifest.name}", str(error), log.store.is_volatile))
    return None, tuple(skipped), False


_Places = Sequence[tuple[ObjectStore, str]]
_Copies = Mapping[tuple[str, int], _Places]
"""Checksum and size of a part to the stores and keys that hold it."""


def _copies(logs: Sequence[Log]) -> _Copies:
    found: dict[tuple[str, int], dict[tuple[str, str], tuple[ObjectStore, str]]] = {}
    for log in logs:
        for _, manifest in log.checkpoints:
            for part in manifest.parts:
                found.setdefault((part.checksum, part.size_bytes), {})[log.where, part.key] = log.store, part.key
    return {content: tuple(places.values()) for content, places in found.items()}


def _fetch(
    store: ObjectStore, part: Part, copies: _Copies, verified: set[str], fetch: Callable[[ObjectStore, Part], T]
) -> T:
    """Read a part with `fetch`: from the key in the manifest or, with a warning, from another copy.

    The URI that was read is added to `verified`.

    Raises:
        CorruptCheckpointError: all copies are missing or damaged; the message is that of the first.
        CheckpointError: a copy cannot be read for another reason.
    """
    try:
        content = fetch(store, part)
        verified.add(store.uri(part.key))
        return content
    except CorruptCheckpointError as error:
        for other, key in copies.get((part.checksum, part.size_bytes), ()):
            if other.uri(key) != store.uri(part.key):
                with suppress(CorruptCheckpointError):
                    content = fetch(other, replace(part, key=key))
                    verified.add(other.uri(key))
                    message = f"{store.uri('')}: {error}; read from {other.uri(key)}, which has the same content"
                    warnings.warn(message, CheckpointWarning, stacklevel=7)
                    return content
        raise


def _load(
    store: ObjectStore,
    manifest: Manifest,
    reader: Reader,
    copies: _Copies,
    layouts: Mapping[str, ModuleLayout],
    verified: set[str],
) -> dict[str, Any]:
    """Load the parts of this rank. Without `Reader.agree`, first verify the parts of the other ranks.

    If a gang of another size saved the checkpoint, load only the attributes that were equal on all its ranks.

    The URIs of the parts that were read are added to `verified`.
    """
    foreign = manifest.world_size != reader.world_size and any(part.rank is not None for part in manifest.parts)
    if foreign and not reader.other_world:
        raise CheckpointError(
            f"{store.uri('')} {manifest.name} has parts of each of {manifest.world_size} ranks, but this gang has "
            f"{reader.world_size}: pass "
            "settings=CheckpointSettings(other_world=True) to load it without these parts"
        )
    mine = manifest.parts_of(-1 if foreign else reader.rank)
    if reader.agree is None:
        for part in manifest.parts:
            if part not in mine:
                _fetch(store, part, copies, verified, verify_part)

    def value(part: Part) -> Any:
        others = copies.get((part.checksum, part.size_bytes), ())

        def content(store: ObjectStore, part: Part) -> Any:
            layout = layouts.get(part.name)
            found = verified_part(store, part, layout, others) if layout is not None else None
            if found is not None:
                return found
            return fetch_tensors(store, part) if part.kind == parts.TENSORS else fetch_part(store, part)

        found = _fetch(store, part, copies, verified, content)
        try:
            if isinstance(found, VerifiedPart):
                return found
            return parts.decode(part.kind, found, reader.trusted, name=part.name)
        except CorruptCheckpointError as error:
            raise CorruptCheckpointError(f"{part.key}: {error}") from error

    state = {part.name: value(part) for part in mine}
    saved = {part.rank: value(part) for part in manifest.parts if foreign and part.name == ATTRIBUTES}
    if saved:
        every = [saved.get(rank, {}) for rank in range(manifest.world_size)]
        if equal := _equal_attributes(every, f"{store.uri('')} {manifest.name}"):
            state[ATTRIBUTES] = equal
    return state


def load_one(store: ObjectStore, manifest: Manifest, reader: Reader) -> Checkpoint:
    """Load the given committed checkpoint. A damaged part is read from another checkpoint that has the same content.

    Raises:
        CorruptCheckpointError: a part is missing or damaged, and no other checkpoint has the same content.
        CheckpointError: a part cannot be read for another reason, or the reader may not load the checkpoint.
    """
    log = Log(store)
    log.refresh()
    return Checkpoint(manifest, _load(store, manifest, reader, _copies([log]), {}, set()))


def _equal_attributes(saved: Sequence[Mapping[str, Any]], where: str) -> dict[str, Any]:
    """Return what is equal in the attributes of all ranks (`ChangedAttributes.changed`); {} if nothing is.

    A `CheckpointWarning` names the others, of the checkpoint `where`.
    """
    flat = [dict(_flat(one)) for one in saved]
    names = dict.fromkeys(name for one in flat for name in one)
    equal = {name for name in names if all(name in one and _is_equal(one[name], flat[0][name]) for one in flat)}
    if lost := [f"{path}.{name}" if name else path for kind, path, name in names if (kind, path, name) not in equal]:
        more = f" and {len(lost) - _TOLD} more" if len(lost) > _TOLD else ""
        message = (
            f"{where}: the gang had {len(saved)} ranks, and these attributes differed between them, so they are not "
            f"restored: {', '.join(lost[:_TOLD])}{more}"
        )
        warnings.warn(message, CheckpointWarning, stacklevel=8)
    if not equal:
        return {}
    found: dict[str, Any] = {"values": {}, "generators": {}, "modes": {}, "apart": {}, "made": {}}
    for kind, path, name in filter(equal.__contains__, names):
        if kind == "modes":
            found[kind][path] = flat[0][kind, path, name]
            continue
        found[kind].setdefault(path, {})[name] = flat[0][kind, path, name]
        for more in ("apart", "made") if kind == "values" else ():
            if name in saved[0].get(more, {}).get(path, ()):
                found[more].setdefault(path, []).append(name)
    return found


def _flat(saved: Mapping[str, Any]) -> Iterator[tuple[tuple[str, str, str], Any]]:
    for kind in ("values", "generators"):
        for path, found in saved.get(kind, {}).items():
            yield from (((kind, path, name), one) for name, one in found.items())
    yield from ((("modes", path, ""), mode) for path, mode in saved.get("modes", {}).items())


def _is_equal(one: Any, other: Any) -> bool:
    encoded = [parts.encode(ATTRIBUTES, {"value": value}) for value in (one, other)]
    return encoded[0][0] == encoded[1][0] and b"".join(encoded[0][1]) == b"".join(encoded[1][1])
