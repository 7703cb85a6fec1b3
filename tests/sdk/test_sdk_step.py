"""`track`, `restore` and `step` of `Checkpointer`, as training scripts use them."""

import json
import random
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mizzen
from mizzen.checkpoint import Checkpointer, CheckpointWarning, StateError, Tracked, list_committed
from tests.sdk.scripts import run

TRAIN = """
import json, random, sys
import mizzen

weights = {"w": [0.0] * 50}
checkpointer = mizzen.Checkpointer(sys.argv[1] if len(sys.argv) > 1 else ROOT, interval_s=INTERVAL)
checkpointer.track(model=weights)
step = checkpointer.restore()
print("from", step, flush=True)
while step < 400:
    weights["w"][random.randrange(50)] += random.random()
    step += 1
    AFTER
    checkpointer.step(step)
print(json.dumps(weights))
"""


def train(root: Path, after: str = "pass", interval_s: float = 0, **variables: str) -> tuple[int, str, str]:
    """Runs the training script; returns its exit code, output and errors."""
    script = TRAIN.replace("ROOT", repr(str(root))).replace("INTERVAL", str(interval_s)).replace("AFTER", after)
    ended = run("import random; random.seed(5)\n" + script, MIZZEN_PLATFORM="sigterm", **variables)
    return ended.returncode, ended.stdout, ended.stderr


def test_a_notice_saves_the_step_and_leaves(tmp_path: Path) -> None:
    """At SIGTERM the current step is saved and the process exits with 143; the resumed training has the same result."""
    code, whole, errors = train(tmp_path / "whole", interval_s=1000)
    assert code == 0, errors
    told = "\n    ".join(("if step in (100, 250): os.kill(os.getpid(), signal.SIGTERM)",))
    root = tmp_path / "run"
    for start, end in ((0, 100), (100, 250)):
        code, out, errors = train(root, told, interval_s=1000)
        assert (code, out) == (143, f"from {start}\n"), errors
        assert "Save now: sigterm reports stop" in errors
        assert list_committed(root)[0].step == end
    code, out, errors = train(root, interval_s=1000)
    assert code == 0, errors
    assert out.splitlines()[0] == "from 250"
    assert out.splitlines()[1] == whole.splitlines()[1]


@pytest.mark.parametrize("there", [False, True])
def test_what_cannot_be_stored_is_found_at_the_start(tmp_path: Path, there: bool) -> None:
    """`restore` is an error if a part cannot be stored, also at the first start, so that no later save fails."""
    checkpointer = Checkpointer(tmp_path)
    if there:
        checkpointer.save(3, Tracked({"net": {"w": 1}}).capture(3))
    checkpointer.track(net=(lambda: {"layers": [object()]}, lambda state: None))
    with pytest.raises(StateError, match=r"part 'net' at layers/0: builtins.object cannot be stored"):
        checkpointer.restore()


def test_a_notice_that_leaves_no_time_saves_nothing_more(tmp_path: Path) -> None:
    """If a save takes longer than the time left, no save is made, and the last periodic checkpoint stays the newest."""
    slow = "import mizzen.checkpoint.writer as w\nreal = w.Writer.write\n"
    slow += "def write(*a, **k):\n    time.sleep(0.3)\n    return real(*a, **k)\nw.Writer.write = write\n"
    script = (
        TRAIN.replace("ROOT", repr(str(tmp_path)))
        .replace("INTERVAL", "0.6")
        .replace("AFTER", "time.sleep(0.005)\n    if step == 390: os.kill(os.getpid(), signal.SIGTERM)")
    )
    ended = run(slow + script, MIZZEN_PLATFORM="sigterm", MIZZEN_NOTICE_WINDOW_S="0.2")
    assert ended.returncode == 143, ended.stderr
    assert "Rely on the last checkpoint" in ended.stderr
    assert 0 < list_committed(tmp_path)[0].step < 390


def test_a_notice_while_a_save_is_written_waits_for_it(tmp_path: Path) -> None:
    """If the current step is being saved in the background at a notice, the process waits for it and exits."""
    script = TRAIN.replace("ROOT", repr(str(tmp_path))).replace("INTERVAL", "1000, background=True")
    told = "if step == 7: checkpointer.save_async(7, {'raw': bytes(9_000_000)}); os.kill(os.getpid(), signal.SIGTERM)"
    ended = run(script.replace("AFTER", told), MIZZEN_PLATFORM="sigterm")
    assert ended.returncode == 143, ended.stderr
    assert [m.step for m in list_committed(tmp_path, verify=True)] == [7]


ADVICE = """
from mizzen import notices
class Advised(notices.Watcher):
    platform = "aws"
    def poll(self):
        return notices.Notice("aws", notices.Kind.REBALANCE, time.time(), None, False, "leave soon")
notices.watch(Advised(notices.Window(120.0, "test"), period_s=0.01))
until(lambda: notices.current() is not None)
"""


def test_advice_saves_once_and_goes_on(tmp_path: Path) -> None:
    """At a rebalance recommendation one checkpoint is saved, and the training continues to its end."""
    script = TRAIN.replace("ROOT", repr(str(tmp_path))).replace("INTERVAL", "1000").replace("AFTER", "pass")
    ended = run(ADVICE + script)
    assert ended.returncode == 0, ended.stderr
    assert [m.step for m in list_committed(tmp_path)] == [1]
    assert "a recommendation; the training continues" in ended.stderr


def test_all_that_is_tracked_comes_back(tmp_path: Path) -> None:
    """`restore` restores objects, random generators and user entries of `progress`; a missing part is an error."""
    weights, generator = {"w": np.arange(5.0)}, np.random.default_rng(1)
    checkpointer = Checkpointer(tmp_path, interval_s=0)
    checkpointer.track(model=weights, noise=generator)
    assert checkpointer.restore() == 0
    checkpointer.progress["epoch"] = 3
    random.seed(4)
    np.random.seed(4)
    checkpointer.step(11)
    checkpointer.step(12)
    expected = (random.random(), np.random.random(), generator.random())
    weights["w"] += 1

    other, fresh = {"w": np.zeros(5)}, np.random.default_rng(2)
    again = Checkpointer(tmp_path)
    again.track(model=other, noise=fresh)
    assert again.restore() == 12
    assert other["w"].tolist() == [0, 1, 2, 3, 4]
    assert (random.random(), np.random.random(), fresh.random()) == expected
    assert again.progress == {"epoch": 3, "step": 12}
    with pytest.raises(StateError, match="'extra'"):
        missing = Checkpointer(tmp_path)
        missing.track(model={}, noise=fresh, extra={})
        missing.restore()


@pytest.mark.parametrize("fits", [True, False])
def test_the_report_says_how_the_load_ended(tmp_path: Path, fits: bool) -> None:
    """The report has the state `started` during a load, then `loaded`, or `failed` with the error."""
    first = Checkpointer(tmp_path / "root", interval_s=0)
    first.track(model={"a": 1})
    for step in (1, 2, 3):
        first.step(step)
    report = tmp_path / "report"
    script = f"""
import json, mizzen
def load(state):
    with open({str(report)!r}) as file:
        assert json.load(file)["load"]["state"] == "started"
    if not {fits}:
        raise RuntimeError("another shape")
checkpointer = mizzen.Checkpointer({str(tmp_path / "root")!r})
checkpointer.track(model=(dict, load))
checkpointer.restore()
"""
    ended = run(script, MIZZEN_PLATFORM="sigterm", MIZZEN_REPORT=str(report))
    assert (ended.returncode == 0) == fits, ended.stderr
    said = json.loads(report.read_text())
    assert said["load"]["state"] == ("loaded" if fits else "failed")
    assert said["resumed_step"] == (3 if fits else None)
    assert fits or "another shape" in said["load"]["error"]


def test_a_gang_does_what_it_agreed_on(tmp_path: Path) -> None:
    """A gang does the greatest action that any rank proposes: a save, or an exit with or without a save."""
    others = 0
    checkpointer = Checkpointer(
        tmp_path, attempt=1, interval_s=1000, rank=0, world_size=2, agree=lambda mine: max(mine, others)
    )
    checkpointer.track(model={"a": 1})
    checkpointer.restore()
    checkpointer.step(1)
    assert list_committed(tmp_path) == []
    others = 1
    checkpointer.step(2)
    assert [m.step for m in list_committed(tmp_path)] == [2]
    # Actions 2 and 3 end the process: 2 after a save, 3 without one.
    for others, steps in ((3, [2]), (2, [4, 2])):
        with pytest.raises(SystemExit) as ended:
            checkpointer.step(3 if others == 3 else 4)
        assert ended.value.code == 143
        assert [m.step for m in list_committed(tmp_path)] == steps


def test_a_failed_save_does_not_stop_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the store is unavailable, each failed save is a warning; a later save is committed."""
    import mizzen.checkpoint.writer as writing

    checkpointer = Checkpointer(tmp_path, interval_s=0)
    checkpointer.track(model={"a": 1})
    checkpointer.restore()
    checkpointer.step(1)

    def away(*_: Any, **__: Any) -> Any:
        raise ConnectionError("the store is unavailable")

    with (
        monkeypatch.context() as patch,
        pytest.warns(CheckpointWarning, match="step 2 was not saved: the store is unavailable"),
    ):
        patch.setattr(writing.Writer, "_put_parts", away)
        checkpointer.step(2)
    checkpointer.step(3)
    assert [m.step for m in list_committed(tmp_path)] == [3, 1]


def test_a_step_that_is_not_due_is_cheap_to_read(tmp_path: Path) -> None:
    """At steps where no save is due, no state is captured and no files change."""
    checkpointer = Checkpointer(tmp_path, interval_s=1000)
    captured: list[int] = []

    def capture() -> dict[str, int]:
        captured.append(1)
        return {"a": 1}

    checkpointer.track(model=(capture, lambda state: None))
    checkpointer.restore()
    captured.clear()  # `restore` has captured the state once, to check that it can be stored.
    before = sorted(path.stat().st_mtime_ns for path in tmp_path.rglob("*"))
    for step in range(1, 2000):
        checkpointer.step(step)
    assert captured == []
    assert sorted(path.stat().st_mtime_ns for path in tmp_path.rglob("*")) == before
    assert re.match(r"The interval was set", checkpointer.cadence.explain().sentences()[2])
    assert mizzen.Checkpointer is Checkpointer
