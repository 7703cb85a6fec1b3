"""Sharded checkpoints: every rank writes its parts, rank 0 commits, and all ranks load the same checkpoint."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mizzen.checkpoint import (
    Checkpoint,
    Checkpointer,
    CheckpointError,
    CheckpointSettings,
    CheckpointWarning,
    StaleAttemptError,
    list_committed,
)

WORLD = 3


def gang(root: object, attempt: int = 1, world_size: int = WORLD, **given: Any) -> list[Checkpointer]:
    """Returns the checkpointers of all ranks of a gang."""
    return [
        Checkpointer(
            str(root),
            attempt=attempt,
            settings=CheckpointSettings(sharded=True, rank=rank, world_size=world_size, **given),
        )
        for rank in range(world_size)
    ]


def state(rank: int, step: int) -> dict[str, Any]:
    return {"model": np.full(5000, step), "rng": [rank, step], "data": {"position": 100 * rank + step}}


def together(ranks: list[Checkpointer], work: Callable[[Checkpointer, int], Any]) -> list[Any]:
    """Calls `work` for all ranks concurrently; returns the result or the exception of each."""
    found: list[Any] = [None] * len(ranks)

    def one(rank: int) -> None:
        try:
            found[rank] = work(ranks[rank], rank)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def save(step: int, *, asynchronous: bool = False) -> Callable[[Checkpointer, int], Any]:
    def work(checkpointer: Checkpointer, rank: int) -> Any:
        if asynchronous:
            return checkpointer.save_async(step, state(rank, step), own={"rng", "data"}).wait()
        return checkpointer.save(step, state(rank, step), own={"rng", "data"})

    return work


@pytest.mark.rotating
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("kind", ["file", "s3"])
def test_each_rank_gets_its_own_parts_back(
    tmp_path: Path, kind: str, asynchronous: bool, request: pytest.FixtureRequest
) -> None:
    """All ranks return one manifest, with the shared parts once and each rank's own parts; each rank loads its own."""
    root = str(tmp_path) if kind == "file" else request.getfixturevalue("s3_url")
    ranks = gang(root)
    for step in (1, 2, 3):
        manifests = together(ranks, save(step, asynchronous=asynchronous))
        assert manifests[0].world_size == WORLD
        assert manifests == [manifests[0]] * WORLD
        names = [(part.name, part.rank) for part in manifests[0].parts]
        own = [(name, rank) for rank in range(WORLD) for name in ("data", "rng")]
        assert sorted(names, key=str) == sorted([("model", None), *own], key=str)
    assert [m.step for m in list_committed(root, verify=True)] == [3, 2]
    for rank, found in enumerate(together(gang(root, 2), lambda c, _: c.load_latest())):
        assert isinstance(found, Checkpoint), found
        assert found.state["model"].tolist() == [3] * 5000
        assert (found.state["rng"], found.state["data"]) == ([rank, 3], {"position": 100 * rank + 3})


def test_nothing_is_committed_before_every_rank_has_written(tmp_path: Path) -> None:
    """If one rank does not save, the other ranks' errors name it, and the previous checkpoint stays the newest."""
    ranks = gang(tmp_path, shard_timeout_s=0.2)
    together(ranks, save(1))
    found = together(ranks, lambda c, rank: save(2)(c, rank) if rank != 2 else None)
    assert isinstance(found[0], CheckpointError) and "rank 2 has not written its shard" in str(found[0])
    assert isinstance(found[1], CheckpointError) and "rank 0 has not committed the checkpoint of step 2" in str(
        found[1]
    )
    assert [m.step for m in list_committed(tmp_path)] == [1]
    newer = gang(tmp_path, 2)
    assert [c.step for c in together(newer, lambda c, _: c.load_latest())] == [1] * WORLD
    together(newer, save(3))
    assert {path.parts[-3] for path in tmp_path.rglob("part-*")} == {"a0001", "a0002"}
    assert not list(tmp_path.glob("shards/**/*.json"))


def test_what_one_rank_cannot_load_no_rank_loads(tmp_path: Path) -> None:
    """If any rank's part is damaged, all ranks fall back to the same older checkpoint."""
    together(gang(tmp_path), save(1))
    together(gang(tmp_path, 2), save(2))
    newest = list_committed(tmp_path)[0]
    (part,) = (part for part in newest.parts if (part.name, part.rank) == ("data", 1))
    path = tmp_path / part.key
    path.write_bytes(path.read_bytes()[::-1])
    ranks = gang(tmp_path, 3)
    with pytest.warns(CheckpointWarning, match="does not match its checksum"):
        found = [checkpointer.load_latest() for checkpointer in ranks]
    assert [c.step for c in found if c] == [1] * WORLD

    # The same if each rank verifies only its own parts and the ranks agree on each checkpoint in turn.
    meeting, told = threading.Barrier(WORLD), [0] * WORLD

    def agree(rank: int) -> Callable[[int], int]:
        def maximum(mine: int) -> int:
            told[rank] = mine
            meeting.wait()
            greatest = max(told)
            meeting.wait()
            return greatest

        return maximum

    ranks = [
        Checkpointer(
            tmp_path,
            attempt=4,
            settings=CheckpointSettings(sharded=True, rank=rank, world_size=WORLD, agree=agree(rank)),
        )
        for rank in range(WORLD)
    ]
    with pytest.warns(CheckpointWarning, match="is skipped"):
        found = together(ranks, lambda c, _: c.load_latest())
    assert [c.step for c in found] == [1] * WORLD
    reasons = [checkpointer.skipped[0].reason for checkpointer in ranks]
    assert "does not match its checksum" in reasons.pop(1)
    assert reasons == ["another rank cannot load its parts"] * 2


def test_another_number_of_ranks_is_told(tmp_path: Path) -> None:
    """A load by a gang of another size is an error; with `other_world=True` only the shared parts load."""
    together(gang(tmp_path), save(1))
    with pytest.raises(CheckpointError, match=r"of each of 3 ranks, but this gang has 2: pass .*other_world=True"):
        gang(tmp_path, 2, world_size=2)[0].load_latest()
    for checkpointer in gang(tmp_path, 2, world_size=2, other_world=True):
        found = checkpointer.load_latest()
        assert found is not None and list(found.state) == ["model"]


def test_equal_attributes_reach_another_number_of_ranks(tmp_path: Path) -> None:
    """Attributes that all ranks have saved with one value; a warning names the others."""

    def changed(rank: int) -> dict[str, Any]:
        values = {"model.head": {"steps": 7, "sums": np.arange(3), "noise": rank}, "model": {"shown": 1}}
        values = values if rank else {"model.head": values["model.head"]}
        generators = {"model": {"dice": [1, 2], "own": [rank]}}
        modes, apart = {"model": [True, []]}, {"model.head": ["sums"]}
        made = {"model.head": ["sums"], "model": ["shown"]} if rank else apart
        return {"values": values, "generators": generators, "modes": modes, "apart": apart, "made": made}

    together(gang(tmp_path), lambda c, rank: c.save(1, {**state(0, 1), "attributes": changed(rank)}))
    for checkpointer in gang(tmp_path, 2, world_size=2, other_world=True):
        lost = r"had 3 ranks, .*not restored: model.head.noise, model.own, model.shown$"
        with pytest.warns(CheckpointWarning, match=lost):
            found = checkpointer.load_latest()
        assert found is not None
        loaded = found.state["attributes"]
        assert loaded["values"].keys() == {"model.head"} and loaded["values"]["model.head"].keys() == {"steps", "sums"}
        assert loaded["values"]["model.head"]["sums"].tolist() == [0, 1, 2]
        assert loaded["generators"] == {"model": {"dice": [1, 2]}}
        assert loaded["modes"] == {"model": [True, []]} and loaded["apart"] == {"model.head": ["sums"]}
        assert loaded["made"] == {"model.head": ["sums"]}


def test_a_zombie_gang_commits_nothing(tmp_path: Path) -> None:
    """After a newer attempt has claimed the root, each rank of an older attempt gets an error, also while it waits."""
    ranks = gang(tmp_path)
    together(ranks, save(1))

    def late(checkpointer: Checkpointer, rank: int) -> Any:
        if rank == 2:
            return Checkpointer(
                tmp_path, attempt=2, settings=CheckpointSettings(sharded=True, rank=2, world_size=WORLD)
            )
        return save(2)(checkpointer, rank)

    found = together(ranks, late)
    assert [type(error) for error in found[:2]] == [StaleAttemptError] * 2, found
    assert [m.step for m in list_committed(tmp_path)] == [1]
    assert not list(tmp_path.rglob("step-0000000002.r0000*"))


def test_ranks_without_an_attempt_are_refused(tmp_path: Path) -> None:
    """Sharded checkpoints of several ranks need a given attempt number and, for `step`, `agree`."""
    with pytest.raises(ValueError, match="attempt=None: a sharded checkpoint needs an attempt number"):
        Checkpointer(tmp_path, settings=CheckpointSettings(sharded=True, rank=0, world_size=2))
    with pytest.raises(CheckpointError, match="set agree in settings"):
        Checkpointer(tmp_path, attempt=1, settings=CheckpointSettings(rank=0, world_size=2)).step(1)
    assert Checkpointer(tmp_path / "alone", settings=CheckpointSettings(sharded=True)).claim() == 1
