"""Parts that a gang sends ahead of its last checkpoint, if only one rank gets the notice. Each rank is a process."""

import os
import resource
import signal
import socket
import struct
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mizzen import notices
from mizzen.checkpoint import Checkpointer, CheckpointSettings, CheckpointWarning, list_committed
from tests.sdk.test_sdk_presync import BIG, SMALL, written_bytes

NOTICED = 1
"""The rank whose machine gets the notice. It does not commit, and in a gang that is not sharded it does not save."""
MIDDLE = 100_000


class _Rank:
    """One rank: a big part that all share and that changes rarely, one of the same kind of its own, and a small one."""

    def __init__(
        self, root: Path, rank: int, line: socket.socket, attempt: int, background: bool, **options: Any
    ) -> None:
        notices.unwatch()
        self.rank, self._line = rank, line
        self.before_agreeing: Callable[[], None] = lambda: None
        self.shared, self.mine, self.small = np.zeros(BIG, np.uint8), np.zeros(MIDDLE, np.uint8), np.zeros(SMALL)
        self.checkpointer = Checkpointer(
            root,
            attempt=attempt,
            keep=9,
            background=background,
            settings=CheckpointSettings(rank=rank, world_size=2, agree=self.agree, **options),
        )
        self.checkpointer.track(own={"mine"}, shared={"w": self.shared}, small={"w": self.small}, mine={"w": self.mine})
        self.step = self.checkpointer.restore()

    def agree(self, number: int) -> int:
        self.before_agreeing()
        self._line.sendall(struct.pack("!q", number))
        (other,) = struct.unpack("!q", self._line.recv(8, socket.MSG_WAITALL))  # Fails if the other rank has ended.
        return max(number, int(other))

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.step += 1
            self.small += 1
            time.sleep(0.002)
            self.checkpointer.step(self.step)

    def start(self) -> None:
        """Trains and saves, then changes the big parts once, as an epoch does."""
        self.train(6)
        if self.checkpointer.writer:
            self.checkpointer.save(self.step, self.checkpointer._tracked.capture(self.step), own=self.checkpointer._own)
        self.shared += 7
        self.mine += 7 + self.rank
        self.train(6)


def _gang(
    fork: Callable[..., Any], work: Callable[[int, socket.socket, Callable[[bytes], None]], None], kill: tuple[int, int]
) -> list[Any]:
    """Starts two ranks. `kill`: the rank that is killed and before which of its file operations (0: none)."""
    lines = socket.socketpair()
    children = []
    for rank in (0, 1):

        def one(tell: Callable[[bytes], None], rank: int = rank) -> None:
            lines[1 - rank].close()
            os.environ["MIZZEN_REPORT"] += f"-{rank}"
            work(rank, lines[rank], tell)

        children.append(fork(one, kill[1] if kill[0] == rank else 0))
    for line in lines:
        line.close()
    return children


def _load(root: Path, rank: int, *, sharded: bool) -> tuple[int, dict[str, Any]]:
    found = Checkpointer(
        root, attempt=9, settings=CheckpointSettings(rank=rank, world_size=2, sharded=sharded)
    ).load_latest()
    assert found is not None
    return found.step, dict(found.state)


def _check(root: Path, *, sharded: bool) -> int:
    """Checks that all ranks load one whole checkpoint, and returns its step."""
    steps = set()
    for rank in (0, 1):
        step, state = _load(root, rank, sharded=sharded)
        steps.add(step)
        big = 7 if step > 6 else 0
        assert (state["shared"]["w"] == big).all()
        assert (state["mine"]["w"] == big + (rank if sharded and big else 0)).all()
        assert (state["small"]["w"] == step).all()
    (step,) = steps
    return step


@pytest.mark.timeout(120)
@pytest.mark.parametrize("sharded", [False, True], ids=["rank 0 saves", "sharded"])
def test_the_gang_sends_ahead_and_saves_the_same_last_step(
    tmp_path: Path, fork: Callable[..., Any], under_an_agent: Callable[[float], None], sharded: bool
) -> None:
    """Only rank 1 gets the notice. Rank 0 sends the big part ahead, and both ranks leave after the same step."""
    root = tmp_path / "root"

    def work(rank: int, line: socket.socket, tell: Callable[[bytes], None]) -> None:
        one = _Rank(root, rank, line, 1, background=True, sharded=sharded)
        one.start()
        if rank == NOTICED:
            under_an_agent(300.0)
        try:
            one.train(10_000)
        finally:
            tell(b"%d" % one.step)

    children = _gang(fork, work, (0, 0))
    assert [child.end() for child in children] == [143, 143]
    ends = [int(child.said()) for child in children]
    last, ahead, first = (manifest.step for manifest in list_committed(root, verify=True))
    assert first == 6 < ahead < last
    assert ends == [last, last]
    written = written_bytes(root)
    assert written[ahead] > BIG
    assert written[last] < written[6] - BIG
    assert _check(root, sharded=sharded) == last


@pytest.mark.timeout(120)
@pytest.mark.parametrize("options", [{"background": False}, {"left_s": 0.4}], ids=["no memory for a copy", "no time"])
def test_otherwise_the_gang_saves_at_once(
    tmp_path: Path, fork: Callable[..., Any], under_an_agent: Callable[[float], None], options: dict[str, Any]
) -> None:
    """Rank 0 decides whether there is memory, rank 1 how much time is left: no parts are sent ahead."""
    root = tmp_path / "root"
    left_s = options.pop("left_s", 300.0)

    def work(rank: int, line: socket.socket, tell: Callable[[bytes], None]) -> None:
        one = _Rank(root, rank, line, 1, **({"background": True} | options))
        one.start()
        one.checkpointer._departure.measured(0.2)
        if rank == NOTICED:
            under_an_agent(left_s)
        try:
            one.train(10_000)
        finally:
            tell(b"%d" % one.step)

    children = _gang(fork, work, (0, 0))
    assert [child.end() for child in children] == [143, 143]
    assert [int(child.said()) for child in children] == [13, 13]
    assert [manifest.step for manifest in list_committed(root)] == [13, 6]


@pytest.mark.timeout(120)
def test_a_save_ahead_that_fails_on_one_rank_does_not_delay_the_last_one(
    tmp_path: Path, fork: Callable[..., Any], under_an_agent: Callable[[float], None]
) -> None:
    """Rank 1 cannot write its part for a while. Rank 0 does not wait ten minutes for it, and both save once more."""
    root = tmp_path / "root"

    def work(rank: int, line: socket.socket, tell: Callable[[bytes], None]) -> None:
        warnings.simplefilter("ignore", CheckpointWarning)
        one = _Rank(root, rank, line, 1, background=True, sharded=True)
        one.start()

        def mend() -> None:
            if one.checkpointer._saving.has_failed:
                resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
                tell(b"failed")

        if rank == NOTICED:
            resource.setrlimit(resource.RLIMIT_FSIZE, (MIDDLE // 2, resource.RLIM_INFINITY))
            one.before_agreeing = mend
            under_an_agent(300.0)
        one.train(10_000)

    children = _gang(fork, work, (0, 0))
    assert [child.end() for child in children] == [143, 143]
    assert children[NOTICED].said().startswith(b"failed")
    last, first = (manifest.step for manifest in list_committed(root, verify=True))
    assert (first, last > 12) == (6, True)
    assert _check(root, sharded=True) == last


@pytest.mark.rotating
@pytest.mark.timeout(300)
@pytest.mark.parametrize("killed", [0, pytest.param(1, marks=pytest.mark.long)])
def test_a_rank_is_killed_at_any_time_between_the_notice_and_the_end(
    tmp_path: Path, fork: Callable[..., Any], under_an_agent: Callable[[float], None], killed: int
) -> None:
    """All ranks load the same whole checkpoint: that before the notice, the one sent ahead, or the last one."""
    seen: set[str] = set()
    for event in range(1, 2000, 23):
        root = tmp_path / f"root-{event}"

        def work(rank: int, line: socket.socket, tell: Callable[[bytes], None], root: Path = root) -> None:
            one = _Rank(root, rank, line, 1, background=True, sharded=True)
            one.start()
            tell(b"noticed")
            if rank == NOTICED:
                under_an_agent(300.0)
            one.train(10_000)

        children = _gang(fork, work, (killed, event))
        codes = {killed: children[killed].end()}
        if codes[killed] != 143:
            os.kill(children[1 - killed].pid, signal.SIGKILL)  # As the agents do when one rank has ended.
        codes[1 - killed] = children[1 - killed].end()
        said = children[killed].said()
        if b"noticed" in said:
            step = _check(root, sharded=True)
            seen.add("before" if step <= 6 else "after")
            if codes[killed] == 143:
                break
    assert codes == {0: 143, 1: 143}
    assert seen == {"before", "after"}
