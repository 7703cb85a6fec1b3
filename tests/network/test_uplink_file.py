"""The measured bandwidth of an interface survives a restart of the agent, and no damaged file."""

import asyncio
import json
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from agent import shim
from agent.network.uplink import BLOCKS, ENOUGH_BLOCKS, BlockFile, KeptBlocks, Uplink
from domain.task_reports import BandwidthReport

MOST_BYTES_S = 1e8


def _file(folder: Path) -> BlockFile:
    return BlockFile(folder / "uplink.json", BLOCKS, MOST_BYTES_S)


def _blocks(count: int = ENOUGH_BLOCKS) -> list[list[float]]:
    now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
    return [[now_s - 100 + n, 1e6 + n] for n in range(count)]


def _put(folder: Path, **changes: Any) -> None:
    body = {"boot_id": shim.boot_id(), "index": socket.if_nametoindex("lo"), "blocks": _blocks()}
    (folder / "uplink.json").write_text(json.dumps(body | changes))


def _reported(folder: Path) -> BandwidthReport | None:
    """Returns what an agent reports after its first reading."""
    uplink = Uplink("lo", MOST_BYTES_S, file=_file(folder))
    try:
        uplink.measure()
        return uplink.report()
    finally:
        uplink.close()


def test_the_next_agent_of_this_boot_knows_the_bandwidth(tmp_path: Path) -> None:
    """The mean, the bound and their time are those of the earlier agent."""
    _put(tmp_path)
    found = _reported(tmp_path)
    assert found is not None
    assert 1e6 <= found.lower_bytes_s <= found.bytes_s <= 1e6 + ENOUGH_BLOCKS
    assert abs(found.at_s - (time.time() - 100 + ENOUGH_BLOCKS - 1)) < 5
    assert _reported(tmp_path) is not None  # The file stays.


@pytest.mark.parametrize(
    "changes",
    [
        {"boot_id": "of another boot"},
        {"index": 1 << 20},
        {"index": True},
        {"index": "1"},
        {"blocks": None},
        {"blocks": {}},
        {"blocks": [[1.0]] * ENOUGH_BLOCKS},
        {"blocks": [[True, 1.0]] * ENOUGH_BLOCKS},
        {"blocks": [["1", 1.0]] * ENOUGH_BLOCKS},
        {"blocks": [[float("nan"), 1e6]] * ENOUGH_BLOCKS},
        {"blocks": [[1.0, float("inf")]] * ENOUGH_BLOCKS},
        {"blocks": [[1.0, -1.0]] * ENOUGH_BLOCKS},
        {"blocks": [[1.0, 1.01 * MOST_BYTES_S]] * ENOUGH_BLOCKS},
        {"blocks": [[10**400, 1.0]] * ENOUGH_BLOCKS},
        {"blocks": _blocks()[::-1]},
        {"blocks": _blocks(BLOCKS + 1)},
        {"blocks": [[1e12, 1e6]] * ENOUGH_BLOCKS},
        {"more": "x" * 20_000},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_what_is_not_of_this_boot_and_interface_or_not_possible_is_not_used(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    """The agent measures anew."""
    _put(tmp_path, **changes)
    assert _reported(tmp_path) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff", b"[" * 10_000])
def test_a_damaged_file_is_not_used(tmp_path: Path, content: bytes) -> None:
    """Neither is a folder in its place, and writing there ends nothing."""
    path = tmp_path / "uplink.json"
    path.write_bytes(content)
    assert _reported(tmp_path) is None
    path.unlink()
    path.mkdir()
    assert _reported(tmp_path) is None
    _file(tmp_path).write(KeptBlocks(1, ((1.0, 1.0),)))
    assert path.is_dir()


@pytest.mark.timeout(60)
async def test_the_agent_writes_new_blocks(tmp_path: Path) -> None:
    """While it runs, without being asked; and it does not write again what the file has."""
    path = tmp_path / "uplink.json"
    uplink = Uplink("lo", MOST_BYTES_S, file=_file(tmp_path))
    uplink.measure()
    running = asyncio.create_task(uplink.run())
    try:
        await asyncio.sleep(0.5)
        assert not path.exists()
        uplink._blocks.extend((at_s, bytes_s) for at_s, bytes_s in _blocks())
        while not path.exists():
            await asyncio.sleep(0.05)
    finally:
        running.cancel()
        await asyncio.wait([running])
        uplink.close()
    assert (path.stat().st_mode & 0o777, path.stat().st_size < 4096) == (0o600, True)
    before = path.stat().st_ino
    assert _reported(tmp_path) is not None
    again = Uplink("lo", MOST_BYTES_S, file=_file(tmp_path))
    running = asyncio.create_task(again.run())
    await asyncio.sleep(1.5)
    running.cancel()
    await asyncio.wait([running])
    again.close()
    assert path.stat().st_ino == before
