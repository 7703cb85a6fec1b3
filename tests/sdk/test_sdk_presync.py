"""Parts that are sent ahead of the last checkpoint within a notice, on a real object-store protocol and on files."""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mizzen import notices
from mizzen.checkpoint import Checkpointer, list_committed
from mizzen.checkpoint.roots import open_root
from tests.depth import examples

BIG, SMALL = 3_000_000, 40_000


class _Training:
    """A big part that changes rarely, and a small one that changes with each step."""

    def __init__(self, root: str | Path, *, background: bool = True, moves: bool = False) -> None:
        notices.unwatch()
        self.big, self.small = np.zeros(BIG, np.uint8), np.zeros(SMALL, np.uint8)
        self._moves = moves
        self.checkpointer = Checkpointer(root, attempt=1, keep=9, background=background)
        self.checkpointer.track(big={"w": self.big}, small={"w": self.small})
        self.step = self.checkpointer.restore()

    def train(self, steps: int = 1) -> None:
        for _ in range(steps):
            self.step += 1
            self.small += 1
            if self._moves:
                self.big += 1
            time.sleep(0.002)
            self.checkpointer.step(self.step)

    def save(self) -> None:
        """Saves as the cadence would have."""
        self.checkpointer.save(self.step, self.checkpointer._tracked.capture(self.step))

    def until_it_exits(self) -> int:
        """Trains until the process would exit, and returns how many steps were done."""
        first = self.step
        with pytest.raises(SystemExit) as ended:
            self.train(10_000)
        assert ended.value.code == 143
        return self.step - first


def written_bytes(root: str | Path) -> dict[int, int]:
    """Returns how many bytes are stored for each step: what its save has sent."""
    found: dict[int, int] = {}
    for info in open_root(root).list("parts/"):
        if info.key.endswith("/manifest.json"):
            continue
        step = int(info.key.split("/step-")[1].split(".")[0])
        found[step] = found.get(step, 0) + info.size_bytes
    return found


def _start(training: _Training) -> None:
    """Trains and saves, then changes the big part once, as an epoch does."""
    training.train(6)
    training.save()
    training.big += 7
    training.train(6)


def test_the_last_save_sends_only_what_still_changes(s3_url: str, under_an_agent: Callable[[float], None]) -> None:
    """The big part has changed since the newest checkpoint. It goes ahead while the training continues."""
    training = _Training(s3_url)
    _start(training)
    under_an_agent(300.0)
    assert training.until_it_exits() >= 3
    last, ahead, first = (manifest.step for manifest in list_committed(s3_url, verify=True))
    assert first == 6 < ahead < last == training.step
    written = written_bytes(s3_url)
    assert sorted(written) == [6, ahead, last]
    assert written[ahead] > BIG
    assert SMALL <= written[last] < 2 * SMALL
    found = Checkpointer(s3_url, attempt=2).load_latest()
    assert found is not None and found.step == last
    assert (found.state["big"]["w"] == 7).all()
    assert (found.state["small"]["w"] == last % 256).all()
    told = json.loads(Path(os.environ["MIZZEN_REPORT"]).read_text())
    assert told["pre_sync"] is False
    assert told["checkpoint"]["sent_bytes"] == written[last] < told["checkpoint"]["bytes"]


@pytest.mark.parametrize(
    ("left_s", "options"),
    [(300.0, {"moves": True}), (0.0, {}), (300.0, {"background": False})],
    ids=["everything changes", "no time", "no memory for a copy"],
)
def test_otherwise_the_last_save_comes_at_once(
    tmp_path: Path, under_an_agent: Callable[[float], None], left_s: float, options: dict[str, bool]
) -> None:
    """At most one more step is done, to compare; and nothing is sent twice."""
    training = _Training(tmp_path / "root", **options)
    _start(training)
    slow_s = 0.05
    training.checkpointer._departure.measured(slow_s)
    under_an_agent(left_s or 2.5 * slow_s)
    assert training.until_it_exits() <= (2 if "moves" in options else 1)
    assert [manifest.step for manifest in list_committed(tmp_path / "root")] == [training.step, 6]


@pytest.mark.parametrize("first", [False, True], ids=["an evaluation", "the first step"])
def test_a_long_step_does_not_lose_the_last_checkpoint(
    tmp_path: Path, under_an_agent: Callable[[float], None], first: bool
) -> None:
    """The next step may be as long as the longest so far. If the notice is shorter, or none is known: save now."""
    training = _Training(tmp_path / "root")
    if not first:
        _start(training)
        time.sleep(0.6)
        training.train(12)
    else:
        training.train(1)
    training.checkpointer._departure.measured(0.001)
    under_an_agent(300.0 if first else 0.5)
    assert training.until_it_exits() == 1
    assert list_committed(tmp_path / "root")[0].step == training.step


def test_a_save_in_the_background_is_completed_and_taken_over(
    tmp_path: Path, under_an_agent: Callable[[float], None]
) -> None:
    """If a save is being written when the notice comes, its parts are not sent again."""
    training = _Training(tmp_path / "root")
    _start(training)
    training.checkpointer.save_async(training.step, training.checkpointer._tracked.capture(training.step))
    under_an_agent(300.0)
    training.until_it_exits()
    written = written_bytes(tmp_path / "root")
    assert written[12] > BIG
    assert written[training.step] < 2 * SMALL


@pytest.mark.rotating
def test_killed_at_any_time_between_the_notice_and_the_end(
    tmp_path: Path, under_an_agent: Callable[[float], None], fork: Callable[..., Any]
) -> None:
    """The newest complete checkpoint is whole: that before the notice, the one sent ahead, or the last one.

    A kill is tried before every thirteenth file operation, by default before every 29th.
    """

    def killed(event: int) -> tuple[str, bool, int]:
        """Kills a training before this file operation. Returns the place of the newest checkpoint, whether the training
        had ended, and its exit code.
        """
        root = tmp_path / f"root-{event}"
        first = _Training(root)
        _start(first)

        def work(tell: Callable[[bytes], None]) -> None:
            training = _Training(root)
            training.big += 7
            training.train(2)
            training.save()
            training.big += 7
            training.train(6)
            under_an_agent(300.0)
            tell(b"noticed")
            try:
                training.train(10_000)
            finally:
                tell(b"ended")

        child = fork(work, event)
        code, said = child.end(), child.said()
        found = Checkpointer(root, attempt=3).load_latest()
        assert found is not None
        assert len(set(found.state["big"]["w"])) == len(set(found.state["small"]["w"])) == 1
        state = "unnoticed" if b"noticed" not in said else "before" if found.step <= 8 else "after"
        return state, b"ended" in said, code

    seen: list[str] = []
    every = 13 if examples(100) >= 100 else 29
    for event in range(1, 2000, every):
        state, ended, code = killed(event)
        seen.append(state)
        if ended or code != -signal.SIGKILL:
            break
    assert ended
    # On a busy machine few operations are between the notice and the checkpoint that is sent ahead.
    first_after = 1 + every * seen.index("after")
    for event in range(first_after - 1, first_after - every, -1):
        if "before" in seen:
            break
        seen.append(killed(event)[0])
    assert {"before", "after"} <= set(seen)
