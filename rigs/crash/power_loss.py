"""Simulates power losses during the file operations of real saves, and checks the checkpoints afterwards.

The operations on a folder are recorded (`rigs.crash.disk_recording`) during claims, saves, removals and kills. `check`
tests every possible state of the disk after a power loss (`rigs.crash.disk_model`): there must be a checkpoint that is
no older than the last acknowledged one, with exact content and without warnings, and the next attempt must be able to
claim, save and load.
"""

import os
import random
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from mizzen.checkpoint import Checkpointer, list_committed
from rigs.crash.disk_model import Disk, Tree, crashes, everything, materialise
from rigs.crash.disk_recording import Killed, Recording, recording

ROOT = "runs/one"
"""Root of the checkpoints, relative to the base; the first save creates its folders."""
TOKENS = b"the same in each checkpoint " * 40


def state(step: int) -> dict[str, Any]:
    """Returns the state of a step: one part is constant, three change with the step."""
    return {
        "model": random.Random(step).randbytes(3000),
        "tokens": TOKENS,
        "progress": {"step": step},
        "order": random.Random(step + 1).sample(range(50), 50),
    }


def saves(base: Path, recorder: Recording, steps: Sequence[int], keep: int) -> None:
    """Runs one process, which claims, loads, and saves these steps."""
    kept = Checkpointer(base / ROOT, keep=keep)
    kept.load_latest()
    for step in steps:
        kept.save(step, state(step))
        recorder.acknowledge(step)


def record(base: Path, keep: int, kills: Sequence[int]) -> Recording:
    """Records a training on a new root. Each process but the last is killed after the number of operations in `kills`.

    Raises:
        AssertionError: the recorded operations do not result in the files on the disk.
    """
    with recording(base) as recorder:
        step = 1
        for kill in [*kills, None]:
            recorder.restart(kill)
            with suppress(Killed):
                saves(base, recorder, range(step, step + 3), keep)
            step += 3
    disk = Disk()
    for mutation in recorder.mutations:
        disk.do(mutation)
    there: Tree = {}
    for path in sorted(base.rglob("*")):
        there[path.relative_to(base).as_posix()] = None if path.is_dir() else path.read_bytes()
    assert disk.crash(everything) == there, "not every operation was recorded"
    return recorder


class LostWork(AssertionError):
    """A training cannot resume correctly from a state of the disk."""


def check(tree: Tree, base: Path, acknowledged: int, keep: int) -> None:
    """Loads, claims and saves in a state of the disk.

    Raises:
        LostWork: the step `acknowledged` (0: none) or a later one is missing, the content is wrong, or claim, load or
            save fail.
    """
    materialise(tree, base)
    sync, platform = os.fsync, os.environ.get("MIZZEN_PLATFORM")
    # Skips the search for a cloud's metadata server, which does not exist here.
    os.environ["MIZZEN_PLATFORM"] = "sigterm"
    os.fsync = lambda _: None  # type: ignore[assignment]  # These saves need not be durable.
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            kept = Checkpointer(base / ROOT, keep=keep)
            found = kept.load_latest()
            step = found.step if found else 0
            if step < acknowledged:
                raise LostWork(f"step {acknowledged} was acknowledged, but the newest checkpoint has step {step}")
            if found is not None and found.state != state(step):
                raise LostWork(f"the checkpoint of step {step} has wrong content")
            kept.save(1000, state(1000))
            newest = list_committed(base / ROOT, verify=True)[:1]
            if [manifest.step for manifest in newest] != [1000]:
                raise LostWork(f"after a save of step 1000 the newest checkpoint is {newest}")
    except LostWork as error:
        raise LostWork(f"{error}; files on the disk: {sorted(tree)}") from None
    except Exception as error:
        raise LostWork(f"{error!r}; files on the disk: {sorted(tree)}") from error
    finally:
        os.fsync = sync
        if platform is None:
            del os.environ["MIZZEN_PLATFORM"]
        else:
            os.environ["MIZZEN_PLATFORM"] = platform


def sweep(folder: Path, recorder: Recording, keep: int, rng: random.Random, randoms: int, share: float = 1.0) -> int:
    """Checks a random `share` of the states after a power loss at every point of a recording; returns their number.

    Raises:
        LostWork: see `check`.
    """
    disk = Disk()
    checked = 0
    for done in range(len(recorder.mutations) + 1):
        if done:
            disk.do(recorder.mutations[done - 1])
        acknowledged = max((step for before, step in recorder.acknowledged if before <= done), default=0)
        for tree in crashes(disk, rng, randoms):
            if rng.random() < share:
                try:
                    check(tree, folder, acknowledged, keep)
                except LostWork as error:
                    last = recorder.mutations[max(0, done - 3) : done]
                    told = [mutation if mutation[0] != "write" else mutation[:2] for mutation in last]
                    raise LostWork(f"after {done} operations, the last ones {told}: {error}") from error
                checked += 1
    return checked


def sweeps(states: int, seed: int, say: Callable[[str], None]) -> int:
    """Checks recordings with random kills, until at least `states` states were checked; returns their number.

    Raises:
        LostWork: see `check`.
    """
    rng = random.Random(seed)
    checked = 0
    while checked < states:
        with tempfile.TemporaryDirectory(prefix="power-loss-") as folder:
            keep = rng.choice((1, 2))
            base = Path(folder) / "base"
            base.mkdir()
            kills = [rng.randint(1, 150) for _ in range(rng.randrange(4))]
            recorder = record(base, keep, kills)
            checked += sweep(Path(folder) / "state", recorder, keep, rng, 8)
        say(f"{checked} of {states} states checked")
    return checked
