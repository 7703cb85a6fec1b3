"""Roots that have lost records: no silent start from nothing, no part removed, and the records are rebuilt."""

import json
import random
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mizzen.checkpoint import (
    Checkpointer,
    CheckpointError,
    CheckpointSettings,
    MissingCheckpointError,
    Tiers,
    list_committed,
    open_checkpoints,
)
from mizzen.checkpoint.lost_records import repair
from mizzen.checkpoint.roots import open_root
from mizzen.cli.runner import run
from mizzen.memory import connection
from mizzen.memory.memory_store import token_of
from mizzen.objects.files import FileStore
from tests.depth import examples, few
from tests.sdk import memory_servers

LOST = "parts of checkpoints, but log/ has no usable record of them.*mizzen checkpoint repair"


def state(step: int) -> dict[str, Any]:
    """Returns a state with a part that never changes."""
    return {"model": {"w": np.full(9, step)}, "frozen": b"same" * 100, "progress": {"step": step}}


def saved(root: Path, steps: int = 3, **given: Any) -> None:
    """Saves checkpoints of steps 1, 2, ... as one attempt."""
    checkpointer = Checkpointer(root, **given)
    for step in range(1, steps + 1):
        checkpointer.save(step, state(step))


def files(root: Path) -> set[Path]:
    """Returns all files of a root."""
    return {path for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("attempt", [None, 1, 2])
def test_parts_without_records_are_an_error_and_stay(tmp_path: Path, attempt: int | None) -> None:
    """However often a training starts without a log, it ends with an error, and every part stays."""
    saved(tmp_path, attempt=1)
    shutil.rmtree(tmp_path / "log")
    before = files(tmp_path)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=LOST):
            Checkpointer(tmp_path, attempt=attempt).restore()
        with pytest.raises(CheckpointError, match=LOST):
            Checkpointer(tmp_path, attempt=attempt).save(9, state(9))
    with pytest.raises(MissingCheckpointError, match=LOST):
        open_checkpoints(tmp_path)
    assert files(tmp_path) == before

    careless = Checkpointer(tmp_path, attempt=attempt, settings=CheckpointSettings(start_over=True))
    assert careless.restore() == 0
    careless.save(9, state(9))
    assert careless.attempt == (attempt or 2)
    assert before <= files(tmp_path)


def test_a_lost_checkpoint_is_noticed_although_claims_are_left(tmp_path: Path) -> None:
    """If only the records of checkpoints are lost, the copies beside the parts show it."""
    saved(tmp_path)
    claim = tmp_path / "log" / "0000000001.json"
    assert not claim.exists(), "the newest checkpoints fence as the claim did"
    Checkpointer(tmp_path).claim()
    for path in (tmp_path / "log").iterdir():
        if "checkpoint" in json.loads(path.read_text())["format"]:
            path.unlink()
    with pytest.raises(CheckpointError, match=LOST):
        Checkpointer(tmp_path).restore()


def test_the_first_save_that_was_killed_is_no_loss(tmp_path: Path) -> None:
    """Parts that were never committed do not hinder a start; they stay until a process has loaded a checkpoint."""
    Checkpointer(tmp_path, attempt=1)
    left = tmp_path / "parts/a0001/step-0000000001.r0000.00000000/part-model.bin"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"half")
    second = Checkpointer(tmp_path, attempt=2)
    assert second.load_latest() is None
    second.save(1, state(1))
    assert left.exists()
    assert Checkpointer(tmp_path, attempt=3).load_latest() is not None
    assert not left.exists()


def test_records_are_rebuilt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`repair` writes the records of all intact checkpoints again, and a new training goes on from the newest."""
    saved(tmp_path, attempt=1)
    second = Checkpointer(tmp_path, attempt=2, keep=3)
    assert second.load_latest() is not None
    second.save(4, state(4))
    expected = list_committed(tmp_path, verify=True)
    shutil.rmtree(tmp_path / "log")
    assert run(["checkpoint", "repair", str(tmp_path), "--dry-run", "-o", "name"]) == 0
    assert not (tmp_path / "log").exists()
    assert run(["checkpoint", "repair", str(tmp_path), "-o", "name"]) == 0
    assert capsys.readouterr().out.split() == [manifest.name for manifest in expected[::-1]] * 2
    assert list_committed(tmp_path, verify=True) == expected
    assert repair(open_root(tmp_path)).rebuilt == ()
    third = Checkpointer(tmp_path)
    found = third.load_latest()
    assert found is not None and found.step == 4 and found.state["frozen"] == state(4)["frozen"]
    assert third.save(5, state(5)).id.save > expected[0].id.save
    assert third.attempt == 3


def test_only_intact_checkpoints_are_rebuilt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint with a damaged part, or with a damaged copy of its record, is named, and the exit code is 8."""
    saved(tmp_path, keep=3)
    first, second, third = list_committed(tmp_path)[::-1]
    shutil.rmtree(tmp_path / "log")
    part = next(part for part in third.parts if part.name == "model")
    (tmp_path / part.key).write_bytes(b"x" * part.size_bytes)
    (tmp_path / first.copy_key).write_bytes(b"{}")
    assert run(["checkpoint", "repair", str(tmp_path), "-o", "name"]) == 8
    told = capsys.readouterr()
    assert told.out.split() == [second.name]
    assert "part-model.safetensors does not match its checksum" in told.err and "cannot be read" in told.err
    assert [manifest.step for manifest in list_committed(tmp_path, verify=True)] == [2]


def test_a_copy_that_a_kill_has_prevented_is_written_at_the_next_start(tmp_path: Path) -> None:
    """A process that loads a checkpoint whose record has no copy writes the copy."""
    saved(tmp_path, attempt=1)
    newest = list_committed(tmp_path)[0]
    (tmp_path / newest.copy_key).unlink()
    Checkpointer(tmp_path, attempt=2).load_latest()
    shutil.rmtree(tmp_path / "log")
    assert repair(open_root(tmp_path)).rebuilt[-1] == newest


def test_parts_are_kept_if_all_records_are_damaged(tmp_path: Path) -> None:
    """A new attempt that cannot read any record removes no part, so the records can be rebuilt."""
    saved(tmp_path, attempt=1)
    newest = list_committed(tmp_path)[0]
    for path in (tmp_path / "log").iterdir():
        path.write_bytes(b"?")
    before = files(tmp_path / "parts")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(2):
            with pytest.raises(CheckpointError, match=LOST):
                Checkpointer(tmp_path, attempt=2).restore()
    assert files(tmp_path / "parts") == before
    assert repair(open_root(tmp_path)).rebuilt[-1] == newest
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = Checkpointer(tmp_path, attempt=3).load_latest()
    assert found is not None and found.step == 3


def mixed(chance: random.Random, root: Path, other: Path) -> None:
    """Puts files of another run in a root: records, or parts that no record names, or parts in the place of its own."""
    folder = chance.choice(("log", "parts", "content"))
    if folder == "content":
        strange, found = sorted(files(other / "parts")), sorted(files(root / "parts"))
        for path in chance.sample(found, chance.randint(min(1, len(found)), len(found))):
            path.write_bytes(next((one for one in strange if one.name == path.name), strange[0]).read_bytes())
        return
    if chance.random() < 0.3:
        shutil.rmtree(root / folder)
    shutil.copytree(other / folder, root / folder, dirs_exist_ok=True)


def damage(chance: random.Random, roots: list[Path], other: Path) -> None:
    """Loses the log, the parts, or single files of one or several roots; flips bits; truncates; mixes runs."""
    for root in chance.sample(roots, chance.randint(1, len(roots))):
        kind = chance.choice(("log", "parts", "both", "files", "bits", "cut", "mixed"))
        if kind == "mixed":
            mixed(chance, root, other)
        for folder in {"log": ["log"], "parts": ["parts"], "both": ["log", "parts"]}.get(kind, ()):
            shutil.rmtree(root / folder, ignore_errors=True)
        found = sorted(files(root))
        for path in chance.sample(found, chance.randint(0, len(found))) if kind in ("files", "bits", "cut") else ():
            raw = bytearray(path.read_bytes())
            if kind == "files" or not raw:
                path.unlink()
            elif kind == "cut":
                path.write_bytes(raw[: chance.randrange(len(raw))])
            else:
                raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
                path.write_bytes(raw)


@pytest.fixture(name="machine")
def _machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A machine with memory servers; they hold nothing of other tests."""
    with memory_servers.machines("a") as (machine,):
        monkeypatch.setenv("MIZZEN_MEMORY_DIR", str(machine))
        yield machine


def lose_memory(chance: random.Random, root: Path, machine: Path, other: Path) -> None:
    """Loses the memory of a machine, some of its parts, or the records of what it holds; flips bits in it; or not."""
    kind = chance.choice(("none", "server", "records", "parts", "bits"))
    if kind == "server":
        memory_servers.kill(machine)
    elif kind == "records":
        damage(chance, [root / "memory"], other)
    elif kind != "none":
        server = connection.local_server(token_of(FileStore(root)))
        held = server.ask("list", prefix="")["found"]
        for key in chance.sample(sorted(held), chance.randint(0, len(held))):
            content = memoryview(bytearray(held[key]))
            server.get(key, content, 0)
            content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
            server.delete([key])
            if kind == "bits":
                server.put(key, [content])


@pytest.mark.rotating
@pytest.mark.chaos
@pytest.mark.parametrize("block", few(range(10), 3))
def test_no_damage_makes_a_wrong_a_silent_or_a_last_start(tmp_path: Path, block: int, machine: Path) -> None:
    """1,000 damaged trees, of one or two roots, with and without memory: each start loads exactly, or changes nothing.

    It starts from nothing only if no root has a file left. After an error no part is gone, and after the removals of
    two starts, a checkpoint that could be loaded still can be.
    """
    other = tmp_path / "other"
    stranger = Checkpointer(other, attempt=5, keep=3)
    for step in range(1, 7):
        stranger.save(step, {"table": {"w": np.full(20, 255, np.uint8), "frozen": [3]}, "rng": {"python": [step]},
                             "progress": {"step": step}})  # fmt: skip
    for seed in range(block, examples(1000), 10):
        chance = random.Random(seed)
        folder = tmp_path / str(seed)
        near = folder / "near" if chance.random() < 0.4 else None
        far = folder / "far"
        states: dict[int, bytes] = {}
        step = 0
        settings = CheckpointSettings(tiers=Tiers(idle_s=60) if chance.random() < 0.3 else None)
        for attempt in range(1, chance.randint(2, 4)):
            saver = Checkpointer(far, local=near, attempt=attempt, keep=chance.randint(1, 3), settings=settings)
            assert (saver.load_latest() is not None) == bool(step)
            for _ in range(chance.randint(1, 3)):
                step += 1
                states[step] = chance.randbytes(20)
                if chance.random() < 0.5:
                    saver.only_due_tiers()
                table: dict[str, Any] = {"w": np.frombuffer(states[step], np.uint8), "frozen": [1, 2]}
                rng = saver._tracked.capture(step)["rng"]
                saver.try_save(step, {"table": table, "rng": rng, "progress": {"step": step}})
        if settings.tiers is not None:
            lose_memory(chance, far, machine, other)
        roots = [root for root in (near, far) if root is not None]
        damage(chance, roots, other)
        left = any(files(root / "parts") or files(root / "log") for root in roots)
        parts = {path for root in roots for path in files(root / "parts")}
        attempt_given = chance.choice((None, 6))  # More than that of the other run.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            before: int | None = None
            for _ in range(3):
                table = {"w": np.zeros(20, np.uint8), "frozen": [0]}
                held = table["w"]
                try:
                    starter = Checkpointer(far, local=near, attempt=attempt_given, settings=settings)
                    starter.track(table=table)
                    found = starter.restore()
                except CheckpointError:
                    found = None
                    assert all(path.exists() for path in parts), f"seed {seed}: parts were removed"
                    assert held is table["w"] and not held.any() and table["frozen"] == [0], f"seed {seed}"
                if found:
                    assert held.tobytes() == states[found] and table["frozen"] == [1, 2], f"seed {seed}"
                    starter.claim()
                elif found == 0:
                    assert not left, f"seed {seed}: a silent start"
                    break
                assert before is None or found == before, f"seed {seed}: {before} could be loaded, and then {found}"
                before = found
                attempt_given = None if attempt_given is None else attempt_given + 1
        shutil.rmtree(folder)
        memory_servers.kill(machine)
