"""A day's work: commands of the table in docs/coming-from.md do on a running stack what their rows say."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.test_coming_from import COMMANDS
from tests.stack.harness import Up, wait_until

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300), pytest.mark.long]
_MIZZEN = Path(sys.executable).parent / "mizzen"
_RUN = """
if [ -n "$MIZZEN_ARRAY_INDEX" ]; then
    echo "Error $MIZZEN_ARRAY_INDEX"; [ "$MIZZEN_ARRAY_INDEX" != 3 ] || exit 3
fi
mkdir -p out; echo best > out/w; echo "LR=$LR TASKS=$WORLD_SIZE"; echo "loss 1" >&2
while [ -n "$GATE" ] && [ ! -e "$GATE" ]; do sleep 0.1; done
"""


class Day:
    """A user's folder and the commands that are typed in it; each is one of the page."""

    def __init__(self, stack: Up, folder: Path) -> None:
        """Writes the files that the page's commands name."""
        self.stack, self.folder, self.seen = stack, folder, set[str]()
        self.gate = folder / "gate"
        self.environ = {**os.environ, "MIZZEN_API": stack.client().url, "MIZZEN_API_KEY": _key(stack)}
        resources = {"cpus": 0.1, "memory": "64MiB"}
        job = {"name": "main", "resources": resources, "run": _RUN, "env": {"GATE": str(self.gate)}}
        document = {"version": 1, "name": "train", "tenant": "t", "jobs": [job], "labels": {"sweep": "42"}}
        (folder / "train.yaml").write_text(yaml.safe_dump({**document, "outputs": {"model": "./out"}}))
        (folder / "train.sbatch").write_text("#!/bin/bash\n#SBATCH --mem=64M --ntasks=2\nsrun echo from slurm\n")
        (folder / "a.out").write_text("#!/bin/sh\necho rank $RANK\n")
        (folder / "a.out").chmod(0o755)

    def says(self, command: str, *more: str, code: int = 0) -> str:
        """Runs a command of the page, with options that the page leaves to the user; returns what it prints."""
        assert command in COMMANDS, f"docs/coming-from.md has no `mizzen {command}`"
        self.seen.add(command)
        return self.told([*shlex.split(command), *more], code)

    def told(self, words: list[str], code: int = 0) -> str:
        """Runs a command with an exit code that must be `code`; returns its stdout."""
        if words[0] == "run":
            words[1:1] = ["--tenant", "t", "--cpus", "0.1", "--memory", "64MiB"]
        done = subprocess.run(
            [_MIZZEN, *words], cwd=self.folder, env=self.environ, text=True, capture_output=True, timeout=120,
            stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
        assert done.returncode == code, (words, done.returncode, done.stdout, done.stderr)
        return done.stdout

    def becomes(self, id_: str, phase: str) -> None:
        """Waits until a workload is in a phase."""
        wait_until(lambda: self.stack.phase(id_) == phase, f"{id_} is {phase}")

    def spec(self, id_: str) -> dict[str, Any]:
        """Returns the document of a workload."""
        return dict(self.stack.client().workload(id_)["spec"])


def _key(stack: Up) -> str:
    return (stack.data / "operator.key").read_text().strip()


def _ids(text: str) -> set[str]:
    return set(re.findall(r"wl-[a-z0-9]+", text))


def test_one_workload(shared: Up, tmp_path: Path) -> None:
    """It is converted, submitted, watched, held, fetched, run again and cancelled."""
    day = Day(shared, tmp_path)
    day.says("convert train.sbatch -o converted.yaml")
    id_ = day.told(["submit", "converted.yaml", "--tenant", "t", "--wait"]).split()[0]
    assert day.told(["logs", "-f", id_]).count("from slurm") == 2
    assert "rank 0" in (said := day.says("run --tasks 2 --gpus a100:1 -- ./a.out")) and "rank 1" in said
    job = day.says("run --detach -- ./a.out").strip()
    day.becomes(job, "succeeded")
    assert not _ids(day.says("submit train.yaml --dry-run")) & {one["id"] for one in shared.client().workloads()}
    train = day.says("submit train.yaml --env LR=1").strip()
    day.becomes(train, "running")
    after = day.says("submit train.yaml --after train:ended", "--name", "next").strip()
    later = day.says("submit train.yaml --not-before 2h", "--name", "later").strip()
    wait_until(lambda: "LR=1" in day.says("logs -n 100 train"), "its output")
    assert day.says("logs train --since 10m").count("loss 1") == 1
    assert train in day.says("ls --live") and train in day.says("ls") and train in day.says("ls --name train")
    assert {after, later} <= _ids(pending := day.says("ls --phase pending")) and train not in pending
    assert train in day.says("ls -o name").split() and "running" in day.says("show train")
    assert "running" in day.says("why train") and day.says("events train").count("\n") > 2
    assert {one["id"] for one in yaml.safe_load(day.says("ls -o json"))} >= {train, after, later, job}
    assert {one["name"] for one in yaml.safe_load(day.told(["tenants", "-o", "json"]))} >= {"t"}
    assert len(day.says("machines", "-o", "name").split()) == shared.machines
    assert "train" in day.told(["why", "next"]) and "not let it start before" in day.told(["why", "later"])
    day.says("preempt train")
    wait_until(lambda: shared.client().workload(train)["attempt"] == 2, "it begins again")
    day.becomes(train, "running")
    day.gate.touch()
    day.says("wait train")
    assert "model" in day.says("get train")
    day.says("get train model --to best")
    assert [one.read_text() for one in (tmp_path / "best").rglob("w")] == ["best\n"]
    day.becomes(after, "succeeded")
    again = day.says("retry train").strip()
    assert again != train and "loss 1" in day.says("logs -f train --grep loss")
    assert shared.client().wait([again])[0]["phase"] == "succeeded"
    wide = day.says("submit train.yaml --tasks 4").strip()
    assert shared.client().wait([wide])[0]["phase"] == "succeeded" and "TASKS=4" in day.says("logs --task 1 train")
    limit = day.says("submit train.yaml --set limits.max_runtime=2h", "--not-before", "1h").strip()
    assert day.spec(limit)["limits"]["max_runtime"] == 7200
    day.says("hold train")
    assert "hold" in day.told(["why", limit])
    day.says("release train")
    day.says("cancel --label sweep=42")
    day.becomes(later, "cancelled")
    day.becomes(limit, "cancelled")
    night = day.says("submit train.yaml --name night").strip()
    assert shared.client().wait([night])[0]["name"] == "night"
    assert len(day.seen) >= 30


def test_one_array(shared: Up, tmp_path: Path) -> None:
    """It is throttled, read, cancelled in parts and run again."""
    day = Day(shared, tmp_path)
    sweep = day.says("submit train.yaml --array 0-9%2", "--name", "sweep").strip()
    client = shared.client()

    def states(*phases: str) -> list[int]:
        return sorted(int(one["id"].rpartition("-")[2]) for one in client.workloads(array=sweep, phases=phases))

    wait_until(lambda: states("running") == [0, 1], "two elements run")
    assert f"{sweep}-1" in day.says("ls --array sweep") and "array_throttled" in day.says("show sweep/7")
    day.says("throttle sweep 4")
    wait_until(lambda: len(states("running")) == 4, "four elements run, after the failed one")
    wait_until(lambda: states("failed") == [3], "one element has failed")
    day.says("cancel sweep/1 sweep/2 sweep/3", code=5)
    wait_until(lambda: states("cancelled") == [1, 2], "two elements are cancelled")
    day.says("cancel sweep --waiting")
    day.gate.touch()
    assert client.wait([sweep])[0]["phase"] == "failed"
    errors = day.says("logs sweep --grep Error").splitlines()
    assert {"sweep/0: Error 0", "sweep/3: Error 3"} <= {*errors} <= {*day.says("logs sweep --tail 3").splitlines()}
    assert "failed" in day.says("ls --phase failed") and sweep in day.told(["ls", "--phase", "failed"])
    again = day.says("retry sweep --failed").strip()
    client.wait([again])
    assert client.workload(again)["array"]["elements"] == 1  # type: ignore[index]
