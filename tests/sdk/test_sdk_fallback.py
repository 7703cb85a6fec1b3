"""Loading skips damaged checkpoints, with a warning that names each and the reason."""

import errno
import json
import os
import random
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mizzen.checkpoint import (
    Checkpointer,
    CheckpointError,
    CheckpointSettings,
    CheckpointWarning,
    Manifest,
    list_committed,
    manifest,
)

STATE = {"model": {"w": np.arange(300.0)}, "rng": {"seed": 5}, "raw": b"x" * 300}
ROUNDS = int(os.environ.get("MIZZEN_CHAOS_ROUNDS", "1"))
FILES = ("part-model.safetensors", "part-rng.json", "part-raw.bin", "0000000003.json")


def _file(root: Path, manifest: Manifest, name: str) -> Path:
    """Returns the file of the part, or, if no part has that name, the newest record of the log."""
    return next((root / part.key for part in manifest.parts if part.key.endswith(name)), _record(root))


def _record(root: Path) -> Path:
    return max((root / "log").iterdir())


def _files(root: Path, manifest: Manifest) -> list[Path]:
    return [*(root / part.key for part in manifest.parts), _record(root)]


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0x10
    path.write_bytes(data)


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def _grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b" x")


def _empty(path: Path) -> None:
    os.truncate(path, 0)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", [_flip, _cut, _grow, _empty, Path.unlink, _folder])
def test_any_damage_to_any_file_falls_back(tmp_path: Path, file: str, damage: Callable[[Path], None]) -> None:
    """If any file of the newest checkpoint is damaged, the previous one loads and a warning names the damage."""
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, STATE)
    newest = checkpointer.save(2, {**STATE, "model": {"w": np.ones(300)}, "rng": {"seed": 6}, "raw": b"y" * 300})
    damage(_file(tmp_path, newest, file))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        found = checkpointer.load_latest()
        committed = list_committed(tmp_path, verify=True)
    assert found is not None and found.step == 1
    assert [m.step for m in committed] == [1]
    if file.startswith("part") or (damage is not Path.unlink and damage is not _folder):
        (entry,) = checkpointer.skipped
        assert (newest.name if file.startswith("part") else "log, record 3") in entry.name
        assert file in entry.reason or "record" in entry.reason
        assert [str(warning.message) for warning in said] == [f"checkpoint {entry.name} is skipped: {entry.reason}"]
    # Without its record the checkpoint is not committed, so nothing is skipped.


def test_every_flipped_bit_is_noticed(tmp_path: Path) -> None:
    """A flipped bit makes a checkpoint invalid: 60 random bits in each of its files are tried."""
    chance = random.Random(7)
    newest = Checkpointer(tmp_path).save(1, STATE)
    for file in _files(tmp_path, newest):
        original = file.read_bytes()
        for _ in range(60):
            data = bytearray(original)
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
            file.write_bytes(data)
            assert list_committed(tmp_path, verify=True) == []
        file.write_bytes(original)
    assert list_committed(tmp_path, verify=True) == [newest]


def test_it_falls_back_as_far_as_needed(tmp_path: Path) -> None:
    """Damaged checkpoints are skipped, newest first. If none is intact, a load is an error without `start_over`."""
    checkpointer = Checkpointer(tmp_path, keep=3)
    saved = [checkpointer.save(step, {"raw": b"%d" % step}) for step in (1, 2, 3)]
    for index in (2, 1):
        _flip(tmp_path / saved[index].parts[0].key)
    with pytest.warns(CheckpointWarning):
        found = checkpointer.load_latest()
    assert found is not None and found.step == 1
    assert [entry.name.split()[-1] for entry in checkpointer.skipped] == [saved[2].name, saved[1].name]
    _empty(tmp_path / saved[0].parts[0].key)
    lost = f"none of 3 checkpoints or records can be loaded; the newest: .*{saved[2].name}: .*start_over=True"
    with pytest.warns(CheckpointWarning), pytest.raises(CheckpointError, match=lost):
        checkpointer.load_latest()
    with pytest.warns(CheckpointWarning), pytest.raises(CheckpointError, match=lost):
        Checkpointer(tmp_path).restore()
    careless = Checkpointer(tmp_path, settings=CheckpointSettings(start_over=True))
    with pytest.warns(CheckpointWarning):
        assert careless.load_latest() is None
    assert len(careless.skipped) == 3


@pytest.mark.parametrize("damage", [_flip, _cut, Path.unlink])
def test_no_checkpoint_rests_on_a_damaged_part_for_long(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    """A damaged shared part is written again: at the next save if its size differs, else within four saves."""
    checkpointer = Checkpointer(tmp_path, keep=2)
    state = {"frozen": np.arange(1000.0)}
    first = checkpointer.save(0, state)
    damage(tmp_path / first.parts[0].key)
    used = [checkpointer.save(step, state).parts[0].key for step in range(1, 6)]
    again = next(index for index, key in enumerate(used) if key != first.parts[0].key)
    assert again == (3 if damage is _flip else 0)
    assert [m.step for m in list_committed(tmp_path, verify=True)] == [5, 4]


def test_a_part_serves_a_bounded_number_of_checkpoints(tmp_path: Path) -> None:
    """A part that never changes is written again after 17 checkpoints, so that damage to a file affects no more."""
    checkpointer = Checkpointer(tmp_path)
    keys = [checkpointer.save(step, {"frozen": b"x" * 5000}).parts[0].key for step in range(40)]
    assert [keys.count(key) for key in dict.fromkeys(keys)] == [17, 17, 6]


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(25 if ROUNDS == 1 else 50 * ROUNDS))
def test_only_what_has_no_whole_copy_is_lost(tmp_path: Path, seed: int) -> None:
    """The newest checkpoint whose parts all have an intact copy is loaded; if there is none, the load is an error."""
    chance = random.Random(seed)
    near = tmp_path / "near" if chance.random() < 0.3 else None
    checkpointer = Checkpointer(tmp_path / "far", local=near, keep=6)
    state: dict[str, bytes] = {}
    for step in range(chance.randint(1, 12)):
        for name in ("a", "b", "c"):
            if name not in state or chance.random() < 0.3:
                state[name] = chance.randbytes(chance.choice((0, 10, 3000))) + b"%d" % (step % 3)
        # The first save of a new process writes all parts, because it has no checksums to compare with.
        if chance.random() < 0.3:
            checkpointer = Checkpointer(tmp_path / "far", local=near, keep=6)
        checkpointer.save(step, state)
    roots = [root for root in (near, tmp_path / "far") if root is not None]
    saved = {root: list_committed(root) for root in roots}
    files = sorted({root / part.key for root in roots for manifest in saved[root] for part in manifest.parts})
    damaged = set(chance.sample(files, chance.randint(1, len(files))))
    for path in sorted(damaged):
        chance.choice((_flip, _cut, _grow, _empty, Path.unlink) if path.stat().st_size else (_grow, Path.unlink))(path)
    whole = {
        (part.checksum, part.size_bytes)
        for root in roots
        for manifest in saved[root]
        for part in manifest.parts
        if root / part.key not in damaged
    }
    loadable = [m for root in roots for m in saved[root] if {(p.checksum, p.size_bytes) for p in m.parts} <= whole]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CheckpointWarning)
        reader = Checkpointer(tmp_path / "far", local=near)
        if not loadable:
            with pytest.raises(CheckpointError, match="can be loaded"):
                reader.load_latest()
            return
        found = reader.load_latest()
    assert found is not None and found.manifest.id == max(m.id for m in loadable)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"format": "mizzen.checkpoint/9"}, "format 'mizzen.checkpoint/9' needs a newer version"),
        ({"parts": [{"name": "a", "key": "parts/../../secret"}]}, "which is not below parts/"),
        ({"parts": [{"name": "a", "key": "/etc/passwd"}]}, "which is not below parts/"),
        ({"parts": 7}, "cannot be read"),
    ],
)
def test_a_record_that_this_version_cannot_follow(tmp_path: Path, change: dict[str, Any], reason: str) -> None:
    """A record with a valid checksum is skipped if its format is newer or a key of it is outside the root."""
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, STATE)
    path = _record(tmp_path)
    body = json.loads(path.read_text())
    del body["record_sha256"]
    body |= change
    body["record_sha256"] = manifest._digest(body)
    path.write_text(json.dumps(body))
    reader = Checkpointer(tmp_path, settings=CheckpointSettings(rank=1, world_size=2))
    with pytest.warns(CheckpointWarning, match=reason), pytest.raises(CheckpointError, match=reason):
        reader.load_latest()


def test_a_missing_permission_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a file cannot be read for a reason other than damage, the load is an error and does not fall back."""
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, STATE)

    def refused(*_: object, **__: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "preadv", refused)
    with pytest.raises(CheckpointError, match="Permission denied"):
        checkpointer.load_latest()


@pytest.mark.parametrize("failure", [OSError(errno.EIO, "Input/output error")])
def test_a_bad_disk_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: OSError) -> None:
    """A checkpoint with a file that causes an I/O error is skipped as damaged."""
    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"a": b"old"})
    newest = checkpointer.save(2, {"a": b"new"})
    real = os.preadv
    bad = (tmp_path / newest.parts[0].key).stat().st_ino

    def read(descriptor: int, *given: Any) -> int:
        if os.fstat(descriptor).st_ino == bad:
            raise failure
        return real(descriptor, *given)

    monkeypatch.setattr(os, "preadv", read)
    with pytest.warns(CheckpointWarning, match="Input/output error"):
        found = checkpointer.load_latest()
    assert found is not None and found.step == 1


def test_a_failed_save_changes_nothing(tmp_path: Path) -> None:
    """A save that fails for lack of space raises an error and leaves no files; the previous checkpoint still loads."""
    import resource
    import signal

    checkpointer = Checkpointer(tmp_path)
    checkpointer.save(1, {"a": 1})
    before = sorted(path for path in tmp_path.rglob("*") if path.is_file())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            checkpointer.save(2, {"a": 2, "big": b"x" * 100_000})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert sorted(path for path in tmp_path.rglob("*") if path.is_file()) == before
    found = checkpointer.load_latest()
    assert found is not None and found.step == 1
