"""Writing to a folder of checkpoints: claims, drafts and commits.

Drafts are written without the lock. What decides, the claim of an attempt and the rename that commits, happens under
one file lock, so that each commit comes either before a newer attempt's claim, and its checkpoint is then that
attempt's to load, or after it, and is refused.
"""

import errno
import fcntl
import hashlib
import json
import os
import re
import secrets
import shutil
import time
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from mizzen.checkpoint.errors import CheckpointError, CheckpointWarning, CorruptCheckpointError, StaleAttemptError
from mizzen.checkpoint.manifest import MANIFEST_FILE, CheckpointId, Manifest, Part
from mizzen.checkpoint.parts import Chunk, file_name
from mizzen.checkpoint.reading import checkpoint_ids, read_manifest

FENCE_FILE = "fence"
LOCK_FILE = ".lock"
LOCK_TIMEOUT_S = 60.0
"""Commits and claims hold the lock for milliseconds; who holds it for longer is frozen."""

_DRAFT = re.compile(r"\.draft-a(\d+)-[0-9a-f]+")
_TRASH = ".trash-"


def sync_folder(path: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_synced(path: Path, chunks: Iterable[Chunk]) -> tuple[int, str]:
    """Write a new file and make its content durable. Returns its size in bytes and its sha256."""
    digest = hashlib.sha256()
    size_bytes = 0
    with open(path, "xb", buffering=0) as file:
        for chunk in chunks:
            view = memoryview(chunk)
            digest.update(view)
            size_bytes += view.nbytes
            while view:
                view = view[file.write(view) :]
        os.fsync(file.fileno())
    return size_bytes, digest.hexdigest()


@contextmanager
def locked(root: Path) -> Iterator[None]:
    """Hold the folder's lock.

    Raises:
        CheckpointError: another process holds it for longer than `LOCK_TIMEOUT_S`.
    """
    handle = os.open(root / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        deadline_s = time.monotonic() + LOCK_TIMEOUT_S
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline_s:
                    message = f"{root / LOCK_FILE}: held by another process for more than {LOCK_TIMEOUT_S:.0f} s"
                    raise CheckpointError(message) from None
                time.sleep(0.01)
        try:
            yield
        finally:
            # Not left to close(): a forked child may share the handle.
            fcntl.flock(handle, fcntl.LOCK_UN)
    finally:
        os.close(handle)


def read_fence(root: Path) -> int | None:
    """The attempt that has claimed the folder; 0 if none has, None if the fence is damaged."""
    try:
        attempt = json.loads((root / FENCE_FILE).read_bytes())["attempt"]
    except FileNotFoundError:
        return 0
    except (ValueError, KeyError, TypeError):
        return None
    return attempt if isinstance(attempt, int) else None


def check_fence(root: Path, attempt: int) -> None:
    """Make sure that the folder is still this attempt's.

    Raises:
        StaleAttemptError: it is not.
    """
    fence = read_fence(root)
    if fence == attempt:
        return
    holder = "by nobody: its fence is missing or damaged" if not fence else f"by attempt {fence}"
    raise StaleAttemptError(f"{root}: claimed {holder}; attempt {attempt} may not write here")


def claim(root: Path, attempt: int | None) -> int:
    """Claim the folder for `attempt`, or (None) for the next one. Several processes of an attempt may.

    From then on nothing of an older attempt can be committed, and what dead writers left is gone.

    Raises:
        StaleAttemptError: a newer attempt has claimed it.
    """
    _make_folder(root)
    with locked(root):
        fence = read_fence(root)
        if fence is None:
            message = f"{root / FENCE_FILE}: damaged; the newest checkpoint's attempt counts instead"
            warnings.warn(message, CheckpointWarning, stacklevel=3)
        newest = max([fence or 0, *(identity.attempt for identity in checkpoint_ids(root))])
        mine = newest + 1 if attempt is None else attempt
        if mine < newest:
            raise StaleAttemptError(f"{root}: claimed by attempt {newest}; attempt {mine} may not write here")
        if fence != mine:
            temporary = root / f".{FENCE_FILE}.tmp"
            temporary.unlink(missing_ok=True)
            write_synced(temporary, [json.dumps({"attempt": mine, "claimed_at_s": time.time()}).encode()])
            temporary.replace(root / FENCE_FILE)
            sync_folder(root)
        trash = [path for path in root.iterdir() if path.name.startswith(_TRASH)]
        trash += [_retire(path) for path in root.iterdir() if _abandoned(path, mine)]
    _remove(trash)
    return mine


def save(root: Path, attempt: int, step: int, encoded: dict[str, tuple[str, list[Chunk]]], keep: int) -> Manifest:
    """Write the parts (name to kind and content), commit them as a checkpoint, then remove all but the newest `keep`.

    Raises:
        StaleAttemptError: a newer attempt has claimed the folder; nothing was committed.
        OSError: it could not be written, say for lack of space; the earlier checkpoints are as they were.
    """
    try:
        with _draft(root, attempt) as draft:
            written = []
            for name, (kind, chunks) in encoded.items():
                file = file_name(name, kind)
                size_bytes, sha256 = write_synced(draft / file, chunks)
                written.append(Part(name, file, kind, size_bytes, sha256))
            with locked(root):
                check_fence(root, attempt)
                manifest = _commit(root, draft, attempt, step, tuple(written))
                trash = _prune(root, manifest.id, keep)
    except OSError:
        # A newer attempt's claim removes the draft under a zombie's hands.
        check_fence(root, attempt)
        raise
    _remove(trash)
    return manifest


def _commit(root: Path, draft: Path, attempt: int, step: int, written: tuple[Part, ...]) -> Manifest:
    number = 1 + max((identity.save for identity in checkpoint_ids(root)), default=0)
    identity = CheckpointId(attempt=attempt, save=number, step=step)
    manifest = Manifest(identity, created_at_s=round(time.time(), 3), parts=written)
    write_synced(draft / MANIFEST_FILE, [manifest.to_bytes()])
    sync_folder(draft)
    draft.rename(root / manifest.name)
    sync_folder(root)
    return manifest


def _prune(root: Path, newest: CheckpointId, keep: int) -> list[Path]:
    """Take away all but `newest` and the valid ones before it, `keep` together. Damaged ones do not count."""
    trash, kept = [], 1
    for identity in checkpoint_ids(root):
        if identity >= newest:
            continue
        try:
            valid = kept < keep and bool(read_manifest(root, identity))
        except CorruptCheckpointError:
            valid = False
        except CheckpointError:
            continue
        kept += valid
        # One that is damaged is kept as long as older ones are: somebody may want to look at it.
        if not valid and kept >= keep:
            trash.append(_retire(root / identity.name))
    return trash


@contextmanager
def _draft(root: Path, attempt: int) -> Iterator[Path]:
    """A folder to write in, which no reader looks at; gone at the end unless it was renamed."""
    path = root / f".draft-a{attempt:04d}-{secrets.token_hex(4)}"
    with locked(root):
        check_fence(root, attempt)
        path.mkdir()
        # Held as long as its writer lives, so that a claim of the same attempt can tell a dead one's draft.
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        _try_lock(handle)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(handle)


def _try_lock(handle: int) -> bool:
    """Take the lock of a draft; False if its writer has it, or nobody can."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        # Some network file systems cannot lock a folder: there, only a newer attempt cleans up.
        if error.errno not in (errno.EWOULDBLOCK, errno.EBADF, errno.ENOLCK, errno.EINVAL, errno.ENOTSUP):
            raise
        return False
    return True


def _abandoned(path: Path, attempt: int) -> bool:
    """Whether `path` is a draft of an older attempt, or of this one by a writer that is dead."""
    found = _DRAFT.fullmatch(path.name)
    if not found:
        return False
    if int(found[1]) != attempt:
        return True
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return False
    try:
        return _try_lock(handle)
    finally:
        os.close(handle)


def _retire(path: Path) -> Path:
    """Rename, so that it is gone at once for everyone; what is left of it can then be removed at leisure."""
    target = path.with_name(f"{_TRASH}{secrets.token_hex(4)}")
    return path.rename(target)


def _remove(trash: list[Path]) -> None:
    for path in trash:
        shutil.rmtree(path, ignore_errors=True)


def _make_folder(path: Path) -> None:
    """Make the folder and those above it, durably."""
    if path.is_dir():
        return
    _make_folder(path.parent)
    path.mkdir(exist_ok=True)
    sync_folder(path.parent)
