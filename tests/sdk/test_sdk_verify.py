"""`Checkpointer(verify=True)`: the script, started once more, shows what the state omits."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from mizzen.checkpoint import list_committed
from mizzen.checkpoint.pictures import differing, picture

SCRIPT = """
import random
import sys
import time
from collections import deque

import numpy as np

import mizzen

root, omitted = sys.argv[1:]


class Optimizer:
    '''Momentum, whose gradients are accumulated over three steps.'''

    def __init__(self):
        self.state = {"momentum": np.zeros(8), "gradient": np.zeros(8), "rate": 0.1}

    def state_dict(self):
        return {name: value for name, value in self.state.items() if name != omitted}

    def load_state_dict(self, state):
        self.state |= {name: value for name, value in state.items() if name != omitted.removeprefix("load ")}


class Average:
    '''An average of the weights. `inner` is also held by the script.'''

    def __init__(self):
        self.inner = np.zeros(8)

    def state_dict(self):
        return {"inner": self.inner}

    def load_state_dict(self, state):
        if omitted == "alias":
            self.inner = state["inner"]
        else:
            self.inner[:] = state["inner"]


weights = {"w": np.ones(8)}
optimizer, average = Optimizer(), Average()
mean = average.inner
noise, order = np.random.default_rng(1), random.Random(2)
loader, ahead = {"position": 0}, {"position": 0}
plateau = {"best": 9e9, "bad": 0}
replay = {"last": [0.0] * 5}
batches = deque()


def batch():
    while len(batches) < 4:
        ahead["position"] += 1
        batches.append((np.sin(np.arange(8) * ahead["position"]), ahead["position"]))
    return batches.popleft()


checkpointer = mizzen.Checkpointer(root, interval_s=0, verify=True)
objects = dict(
    weights=weights, optimizer=optimizer, average=average, noise=noise, order=order, loader=loader, plateau=plateau,
    replay=replay,
)
if omitted == "prefetch":
    objects["loader"] = ahead
objects.pop(omitted, None)
checkpointer.track(**objects)
step = checkpointer.restore()
if omitted != "prefetch":
    ahead["position"] = loader["position"]
while step < 60:
    data, loader["position"] = batch()
    data = data + noise.standard_normal(8) * order.random()
    gradient = weights["w"] - data + 0.1 * np.tanh(replay["last"][0])
    optimizer.state["gradient"] += gradient
    optimizer.state["rate"] *= 0.999
    step += 1
    if step % 3 == 0:
        optimizer.state["momentum"] = 0.9 * optimizer.state["momentum"] + optimizer.state["gradient"]
        weights["w"] -= optimizer.state["rate"] * optimizer.state["momentum"] / 30 + 0.001 * mean
        optimizer.state["gradient"] = 0.1 * optimizer.state["gradient"]
    mean += 0.1 * (weights["w"] - mean)
    loss = float((gradient ** 2).sum())
    replay["last"] = [*replay["last"][1:], loss]
    plateau["best"], plateau["bad"] = min(loss, plateau["best"]), 0 if loss < plateau["best"] else plateau["bad"] + 1
    if plateau["bad"] > 4:
        optimizer.state["rate"] *= 0.9
        plateau["bad"] = 0
    time.sleep(0.01)
    if step > 6:  # Before, some of the state is as at the start.
        checkpointer.step(step)
"""

QUICK = ("noise", "load rate")
OMITTED = {
    "noise": "not tracked: noise .Generator.",
    "order": "not tracked: order .Random.",
    "loader": r"first at (weights|plateau|replay)/",
    "prefetch": r"first at (weights|plateau|replay|loader)/",
    "alias": "average/inner",
    "average": "not tracked: average .Average.",
    "plateau": "first at optimizer/rate: 0",
    "replay": r"first at (weights|plateau|optimizer)/",
    "gradient": r"first at (weights|plateau|replay)/",
    "momentum": r"first at (weights|plateau|replay)/",
    "optimizer": "not tracked: optimizer .Optimizer.",
    "load rate": "right after the restore of step .*, first at optimizer/rate: 0.1 instead of 0.09",
}
"""What each script omits, and what the warning about it contains."""


def verified(folder: Path, omitted: str, *, command: tuple[str, ...] = ()) -> str:
    """Runs the script, and returns what it has written to stderr."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    arguments = [sys.executable, *(command or (str(script),)), str(folder / "root"), omitted]
    source = SCRIPT if command == ("-",) else ""
    done = subprocess.run(arguments, input=source, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.rotating
def test_an_exact_script_is_told_so(tmp_path: Path) -> None:
    """No warning; CPU, memory and stall are printed, and the checkpoint that was copied is removed as any other."""
    said = verified(tmp_path, "nothing")
    assert "Warning" not in said
    found = re.search(
        r"is equal at the steps (\d+(?:, \d+)+). The second run has used [0-9.]+ s of CPU and \d+ MiB; the comparison "
        r"has stalled the training for ([0-9.]+) ms",
        said,
    )
    assert found is not None, said
    assert len(found[1].split(", ")) >= 3
    assert [manifest.step for manifest in list_committed(tmp_path / "root")] == [60, 59]


@pytest.mark.parametrize(
    "omitted", [pytest.param(name, marks=() if name in QUICK else pytest.mark.long) for name in OMITTED]
)
def test_what_the_state_omits_is_found(tmp_path: Path, omitted: str) -> None:
    """Each omission is a warning that names the first entry that differs, and untracked objects with a state."""
    said = " ".join(verified(tmp_path, omitted).split())
    assert "CheckpointWarning: verify: the script, started once more, differs" in said, said
    assert re.search(OMITTED[omitted], said), said


def test_a_script_that_cannot_be_started_again_says_so(tmp_path: Path) -> None:
    """A script from standard input trains on, with a warning."""
    said = verified(tmp_path, "nothing", command=("-",))
    assert "the script cannot be started once more: it is a notebook, or was typed in or read from standard" in said


OVERTAKEN = """
import os
import sys
import time

import mizzen

weights = {"w": 0.0}
checkpointer = mizzen.Checkpointer(sys.argv[1], interval_s=0, verify=True)
checkpointer.track(weights=weights)
step, seen = checkpointer.restore(), 0
while step < 40:
    step, seen = step + 1, seen + 1
    weights["w"] += step + (seen if step == 38 else 0)
    time.sleep(0 if "MIZZEN_VERIFY" in os.environ else 0.05)
    checkpointer.step(step)
"""


def test_a_second_run_that_ends_first_is_compared_to_its_end(tmp_path: Path) -> None:
    """The training takes longer to its last steps, at which both runs differ."""
    (tmp_path / "train.py").write_text(OVERTAKEN)
    done = subprocess.run(
        [sys.executable, str(tmp_path / "train.py"), str(tmp_path / "root")],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "verify: the script, started once more, differs at step" in done.stderr


def test_a_picture_takes_no_longer_than_it_may() -> None:
    """Without time, it has no tensor and one part; it is compared with a whole one by what both have."""
    state = {"model": {"w": np.zeros(9), "rate": 1.0}, "optimizer": {"rate": 1.0}}
    some, whole = picture(state, 0.0), picture(state)
    assert some.keys() == {"model"} and not some["model"]["tensors"]
    assert whole.keys() == state.keys() and len(whole["model"]["tensors"]) == 1
    assert differing(some, whole) == differing(whole, some) == []
    other = picture({"model": {"w": np.ones(9), "rate": 2.0}, "optimizer": {"rate": 2.0}})
    assert [one.path for one in differing(some, other)] == ["model/rate"]
    assert [one.path for one in differing(whole, other)] == ["model/rate", "optimizer/rate", "model/w"]


def test_a_tensor_that_one_state_lacks_is_a_difference() -> None:
    """The trees name all tensors, also those that a picture leaves out."""
    one, other = picture({"m": {"a": np.zeros(2)}}, 0.0), picture({"m": {"a": np.zeros(2), "b": np.zeros(2)}})
    assert [found.path for found in differing(one, other)] == ["m/b"]


def test_a_change_in_any_half_of_a_large_tensor_is_seen() -> None:
    """Samples are spread over a tensor."""
    values = np.zeros(1 << 20, np.uint8)
    before = picture({"m": {"a": values}})
    for low in (0, 1 << 19):
        changed = values.copy()
        changed[low : low + (1 << 19)] += 1
        assert [found.path for found in differing(before, picture({"m": {"a": changed}}))] == ["m/a"]
