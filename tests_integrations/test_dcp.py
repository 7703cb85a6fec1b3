"""Distributed checkpoints of torch in a root: exact with another number of ranks, fenced, and verified."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import load, save
from torch.distributed.checkpoint.api import CheckpointException

from mizzen.checkpoint import Checkpointer, list_committed
from mizzen.cli.runner import run
from mizzen.integrations import dcp
from tests_integrations.dcp_gangs import gang, killed_saves


@pytest.mark.timeout(400)
def test_another_number_of_ranks_loads_the_same_bits(tmp_path: Path) -> None:
    """Two ranks save sharded tensors of several types, in one commit for each save; three and one rank load them."""
    gang("save", tmp_path, 2)
    root = tmp_path / "root"
    found = list_committed(root, verify=True)
    assert [manifest.step for manifest in found] == [3, 2]
    assert [part.name for part in found[0].parts] == ["shard-0000", "shard-0001", "dcp"]
    for ranks in (3, 1):
        gang("load", tmp_path, ranks)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_save_leaves_whole_checkpoints(tmp_path: Path, rank: int) -> None:
    """A rank is killed before some of its file operations of each kind: what is loaded is of one step.

    Rank 0, which also commits, has three times as many.
    """
    assert killed_saves(tmp_path, ranks=2, rank=rank, every=2 if rank else 6) >= 3


def test_an_older_attempt_cannot_commit(tmp_path: Path) -> None:
    """After a newer attempt has claimed the root, the save of an older one fails, and changes nothing."""
    old, new = dcp.RootWriter(tmp_path, attempt=1), dcp.RootWriter(tmp_path, attempt=2)
    for writer, step in ((old, 1), (new, 2)):
        save({"w": torch.full((3,), float(step))}, storage_writer=writer.at(step), no_dist=True)
    with pytest.raises(CheckpointException, match="attempt 2"):
        save({"w": torch.zeros(3)}, storage_writer=old.at(3), no_dist=True)
    state = {"w": torch.zeros(3)}
    load(state, storage_reader=dcp.RootReader(tmp_path), no_dist=True)
    assert state["w"].tolist() == [2.0, 2.0, 2.0]


def test_a_flipped_bit_is_not_loaded(tmp_path: Path) -> None:
    """Each part is verified before a tensor is filled from it."""
    save({"w": torch.arange(999.0)}, storage_writer=dcp.RootWriter(tmp_path).at(1), no_dist=True)
    [part] = [part for part in list_committed(tmp_path)[0].parts if part.name == "shard-0000"]
    content = bytearray((tmp_path / part.key).read_bytes())
    content[100] ^= 1
    (tmp_path / part.key).write_bytes(content)
    state = {"w": torch.zeros(999)}
    with pytest.raises(CheckpointException, match="does not match"):
        load(state, storage_reader=dcp.RootReader(tmp_path), no_dist=True)
    assert not state["w"].any()


@pytest.mark.timeout(400)
def test_damage_that_one_rank_finds_changes_no_rank(tmp_path: Path) -> None:
    """All ranks have verified their parts before any of them changes a tensor."""
    gang("save", tmp_path, 2)
    [part] = [part for part in list_committed(tmp_path / "root")[0].parts if part.name == "shard-0001"]
    path = tmp_path / "root" / part.key
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    gang("fail", tmp_path, 2)


@pytest.mark.timeout(400)
def test_a_load_waits_only_for_its_own_ranks(tmp_path: Path) -> None:
    """Rank 0 loads alone while the others wait for it, which then load in a process group without rank 0."""
    gang("save", tmp_path, 2)
    gang("some", tmp_path, 3)


def test_a_save_needs_a_step(tmp_path: Path) -> None:
    """Without `at(step)` a save is an error, and nothing is created."""
    with pytest.raises(CheckpointException, match=r"pass storage_writer=writer.at\(step\)"):
        save({"w": torch.zeros(3)}, storage_writer=dcp.RootWriter(tmp_path), no_dist=True)
    assert list_committed(tmp_path) == []


@pytest.mark.parametrize("sharded", [True, False])
def test_an_export_is_loaded_by_torch_alone(tmp_path: Path, sharded: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """`export --dcp` of either kind of root; a damaged part leaves no folder."""
    root, target = tmp_path / "root", tmp_path / "a" / "target"
    tensor = torch.arange(6.0).reshape(2, 3).to(torch.bfloat16)
    if sharded:
        save({"model": {"w": tensor}, "step": 4}, storage_writer=dcp.RootWriter(root).at(4), no_dist=True)
    else:
        Checkpointer(root).save(4, {"model": {"w": tensor}, "step": 4})
    assert run(["checkpoint", "export", str(root), str(target), "--dcp"]) == 0
    assert str(target / ".metadata") in capsys.readouterr().out
    state: dict[str, Any] = {"model": {"w": torch.zeros(2, 3, dtype=torch.bfloat16)}, "step": 0}
    load(state, checkpoint_id=str(target), no_dist=True)
    assert torch.equal(state["model"]["w"], tensor) and state["step"] == 4
    for part in (root / "parts").glob("*/*/part-*"):
        part.write_bytes(part.read_bytes()[:-1] + b"?")
    assert run(["checkpoint", "export", str(root), str(tmp_path / "b" / "other"), "--dcp"]) != 0
    assert not (tmp_path / "b").exists()
