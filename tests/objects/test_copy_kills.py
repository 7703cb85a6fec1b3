"""Copies that are killed at random times: the target object is absent or complete, and no other files remain."""

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from infra.copies import CopyStore, open_copy_store
from infra.copies.copy import copy_object
from mizzen.objects import checksums
from tests.objects.store_internals import blocks_bytes, raw_names

ROUNDS = int(os.environ.get("MIZZEN_CHAOS_ROUNDS", "0"))
KILLS = 20 * ROUNDS or 4
PARTS, PART = (12, 20_000)
GIB = 1 << 30
PAIRS = [("file", "file"), ("file", "s3"), ("s3", "gcs")]
PAIRS += [("s3", "s3"), ("gcs", "gcs"), ("gcs", "file")] if ROUNDS else []


class Victim:
    """A process of `tests.objects.killable`."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def copy(self, to: str, kill_after_s: float | None = None) -> dict[str, Any]:
        """Runs a copy, kills it after `kill_after_s` unless that is None, and returns the status and the time."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps({"to": to, "kill_after_s": kill_after_s}), file=self._process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


@contextmanager
def victim(checkout: Path, source_url: str, target_url: str, key: str, part_bytes: int) -> Iterator[Victim]:
    command = [sys.executable, "-m", "tests.objects.killable", source_url, target_url, key, str(part_bytes)]
    paths = os.pathsep.join(map(str, (checkout, checkout / "sdk")))
    with subprocess.Popen(
        command, cwd=checkout, env={**os.environ, "PYTHONPATH": paths}, text=True,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE,
    ) as process:  # fmt: skip
        yield Victim(process)


def _killed(copier: Victim, source: CopyStore, target: CopyStore, judge: Callable[[str], object]) -> int:
    """Runs and kills copies until KILLS kills took effect; returns the number of objects that were completed."""
    rng = random.Random(f"{ROUNDS} {target.uri('')[:2]}")
    full_s = copier.copy("warm")["took_s"]
    hits = copies = 0
    while hits < KILLS:
        to = f"copy-{copies}"
        # Most kills come early, so that one copy is killed several times.
        ended = copier.copy(to, kill_after_s=full_s * rng.random() * rng.choice((0.5, 1.1)))
        assert ended["status"] in (0, -9)
        hits += ended["status"] == -9
        if target.stat(to) is not None:
            judge(to)
            copies += 1
    assert copier.copy(f"copy-{copies}")["status"] == 0
    judge(f"copy-{copies}")
    for store in (source, target):
        store.tidy_uploads(0)
        store.tidy()
    assert raw_names(target) == {"warm", *(f"copy-{number}" for number in range(copies + 1))}
    return copies


@pytest.mark.rotating
@pytest.mark.chaos
@pytest.mark.timeout(1800)
# The stores of the second pair are among those of the others.
@pytest.mark.parametrize("kinds", [PAIRS[0], pytest.param(PAIRS[1], marks=pytest.mark.long), *PAIRS[2:]])
def test_killed_at_random(kinds: tuple[str, str], bucket_of: Callable[[str], str], checkout: Path) -> None:
    """After SIGKILL at any time, a visible object is complete; the last copy succeeds and no other files remain."""
    source_url, target_url = map(bucket_of, kinds)
    source, target = open_copy_store(source_url), open_copy_store(target_url)
    body = random.Random(3).randbytes(PARTS * PART + 1)
    source.put("x", body)

    def judge(to: str) -> None:
        assert target.get(to) == body
        checksum = checksums.checksum("sha256", [body])
        assert copy_object(source, target, "x", name="killed", to=to, checksum=checksum).moved_bytes == 0

    with victim(checkout, source_url, target_url, "x", PART) as copier:
        _killed(copier, source, target, judge)


@pytest.mark.chaos
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "kinds",
    [("file", "file"), *(pytest.param(pair, marks=pytest.mark.long) for pair in (("file", "s3"), ("s3", "file")))],
)
def test_many_small_objects_killed_at_random(
    kinds: tuple[str, str], bucket_of: Callable[[str], str], checkout: Path
) -> None:
    """If concurrent copies of small objects are killed, each object is absent or complete, and completed ones stay."""
    source_url, target_url = map(bucket_of, kinds)
    source, target = open_copy_store(source_url), open_copy_store(target_url)
    rng = random.Random(ROUNDS)
    bodies = {f"t/{number:03d}": rng.randbytes(rng.choice((0, 500, 4096))) for number in range(200 if ROUNDS else 60)}
    for key, body in bodies.items():
        source.put(key, body)

    def clear() -> None:
        for info in list(target.list("t/")):
            target.delete(info.key)

    with victim(checkout, source_url, target_url, "t/", PART) as copier:
        full_s, hits, there = copier.copy("")["took_s"], 0, set[str]()
        clear()
        while hits < KILLS // 2:
            ended = copier.copy("", kill_after_s=full_s * rng.random() * 0.5)
            assert ended["status"] in (0, -9)
            hits += ended["status"] == -9
            seen = {info.key for info in target.list("")}
            assert there <= seen
            assert all(target.get(key) == bodies[key] for key in rng.sample(sorted(seen), min(20, len(seen))))
            there = seen
            if ended["status"] == 0:
                assert there == bodies.keys()
                clear()
                there = set()
        assert copier.copy("")["status"] == 0
    assert {info.key: target.get(info.key) for info in target.list("")} == bodies
    target.tidy_uploads(0)
    target.tidy()
    assert raw_names(target) == bodies.keys()


@pytest.mark.chaos
@pytest.mark.timeout(10_800)  # half an hour on a quiet machine
@pytest.mark.skipif(not ROUNDS, reason="copies 5 GiB; run by `make chaos`")
def test_five_gigabytes_killed_at_random(bucket_of: Callable[[str], str], checkout: Path, tmp_path: Path) -> None:
    """A killed copy of a sparse file of 5 GiB resumes, and the copied file is sparse."""
    source_url, target_url = bucket_of("file"), bucket_of("file")
    source, target = open_copy_store(source_url), open_copy_store(target_url)
    path = Path(source.uri("x").removeprefix("file://"))
    path.parent.mkdir()
    with path.open("wb") as file:
        file.truncate(5 * GIB)
        for at in range(0, 5 * GIB, GIB // 2):
            file.seek(at + at // 1000)
            file.write(random.Random(at).randbytes(100_000))

    def judge(to: str) -> None:
        assert copy_object(source, target, "x", name="judge", to=to).moved_bytes == 0
        assert blocks_bytes(Path(target.uri(to).removeprefix("file://"))) <= 8 << 20
        target.delete(to)
        target.put(to, b"was whole")

    with victim(checkout, source_url, target_url, "x", 64 << 20) as copier:
        _killed(copier, source, target, judge)
