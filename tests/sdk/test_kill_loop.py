"""The bench that kills trainings: it reports no violation for correct code, and finds injected faults."""

import io
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mizzen.checkpoint import Checkpointer, CheckpointSettings
from mizzen.objects.files import FileStore
from rigs.crash import kill_loop
from rigs.crash.kill_loop import VARIANTS, Tally, Variant, arena, loop
from rigs.crash.kill_training import KillJob, KillTraining, SaveStage, expected
from rigs.crash.kill_watch import look


def _looped(tmp_path: Path, kills: int, variants: Sequence[Variant], **job: Any) -> tuple[Tally, list[dict[str, Any]]]:
    told: list[dict[str, Any]] = []
    with arena("file", 7, told.append, tmp_path) as where:
        where.job = replace(where.job, **job)
        return loop(where, kills, lambda _: None, variants), told


def test_a_few_kills_of_each_kind(tmp_path: Path) -> None:
    """Trainings with foreground saves and in a gang of two have no violation, and at least one finishes."""
    chosen = [VARIANTS[0], VARIANTS[3]]
    tally, told = _looped(tmp_path, 10, chosen)
    assert tally.violations == []
    assert tally.kills >= 10 and tally.trainings >= 1 and tally.restarts > 5
    assert sum(tally.places.values()) == tally.processes >= tally.kills
    assert [line["kill"] for line in told if "kill" in line] == list(range(1, tally.kills + 1))
    out = io.StringIO()
    kill_loop.show("file", tally, 1.0, out)
    assert "no violation" in out.getvalue()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.rotating
def test_a_save_that_is_acknowledged_too_early_is_found(tmp_path: Path) -> None:
    """A save that is acknowledged before its commit is found, because a kill in between loses it."""
    tally, _ = _looped(tmp_path, 40, [VARIANTS[0]], eager=True)
    assert any("was acknowledged" in text for text in tally.violations)


class Torn(FileStore):
    """A store whose records are visible before they are complete."""

    def create(self, key: str, body: bytes) -> bool:
        """See `ObjectStore.create`."""
        path = self._path(key)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("xb") as file:
            for piece in (body[:50], body[50:]):
                file.write(piece)
                file.flush()
                time.sleep(0.05)
        return True


@pytest.mark.long
def test_a_record_that_is_not_created_in_one_go_is_found(tmp_path: Path) -> None:
    """A record that is not created atomically is found, because a kill leaves a part of it."""
    tally, _ = _looped(tmp_path, 40, [VARIANTS[0]], open=lambda uri: Torn(Path(uri)))
    assert any("the record is damaged" in text for text in tally.violations)


def test_the_observer_sees_damage_and_other_content(tmp_path: Path) -> None:
    """The observer finds a changed byte, a missing part, and a state that no uninterrupted run has."""
    job = KillJob(3, str(tmp_path / "root"), steps=2)
    table, _ = expected(job)
    training = KillTraining(job.seed, 0)
    kept = Checkpointer(job.root, settings=CheckpointSettings(rank=0, world_size=1))
    kept.track(**training.tracked)
    training.step()
    kept.save(1, kept._tracked.capture(1))
    names = {name for _, name in table}
    assert look(job.root, [table]).wrong == ()
    kept.save(2, kept._tracked.capture(2))
    (wrong,) = look(job.root, [table]).wrong
    assert "differs from an uninterrupted run at step 2" in wrong
    newest = look(job.root).commits[0]
    assert {part["name"] for part in newest.parts} == names
    (key,) = (part["key"] for part in newest.parts if part["name"] == "progress")
    path = Path(job.root, key)
    body = bytearray(path.read_bytes())
    body[random.Random(0).randrange(len(body))] ^= 1
    path.write_bytes(body)
    seen = look(job.root)
    assert seen.newest is not None and seen.newest.step == 1 and "damaged" in seen.wrong[0]
    path.unlink()
    assert "missing" in look(job.root).wrong[0]


def test_every_place_has_words() -> None:
    """`WORDS` has a text for every place of a kill."""
    assert set(kill_loop.WORDS) == set(SaveStage)


@pytest.mark.parametrize(
    "how", [["-m", "rigs.crash.kill_loop"], pytest.param(["rigs/crash/kill_loop.py"], marks=pytest.mark.long)]
)
def test_the_command(how: list[str]) -> None:
    """The command works as a module and as a file: JSON lines on stdout, the table on stderr, exit code 0."""
    home = Path(kill_loop.__file__).parents[2]
    ended = subprocess.run(
        [sys.executable, *how, "--kills", "3", "--seed", "5"],
        cwd=home, env=dict(os.environ), capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    lines = [json.loads(line) for line in ended.stdout.splitlines()]
    assert lines[-1]["kills"] >= 3 and lines[-1]["violations"] == 0
    assert "no violation" in ended.stderr
