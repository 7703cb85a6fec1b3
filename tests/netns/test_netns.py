"""Several machines: an existing Postgres and Temporal, a separate worker, and agents that accept no connections.

Each machine is a network namespace, so reachability and network failures between machines are real.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from infra.stack.ports import free_port
from mizzen.checkpoint import list_committed
from tests.netns.installation import (
    API_PORT,
    DATABASE_PORT,
    EXAMPLE,
    MACHINES,
    REGION,
    TABLE,
    TEMPORAL_PORT,
    Installation,
    machine,
)
from tests.netns.namespaces import Network, why_not
from tests.stack.harness import wait_until

# The method `thread` would end the whole test run and leave the namespaces behind.
pytestmark = [pytest.mark.stack, pytest.mark.timeout(300, method="signal")]
STEPS, SEED = 120, 7
TRAIN = f"train.py --steps {STEPS} --seed {SEED} --silence-s 120"


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installation]:
    """An installation over three namespaces, with both machines ready and the table in its bucket."""
    if reason := why_not():
        pytest.skip(reason)
    network = Network(MACHINES)
    try:
        with Installation(tmp_path_factory.mktemp("netns"), network) as parts:
            _make_table(parts.bucket / "tables" / TABLE)
            try:
                parts.start()
            except Exception as error:
                raise AssertionError(f"{error}\n{parts.tail()}") from error
            parts.api("set_tenant", "vision", 3, {"a100": 2}, None)
            parts.api("add_table", TABLE, REGION)
            yield parts
            codes = parts.stop()
            assert {name: code for name, code in codes.items() if code != 0} == {}, parts.tail()
            assert [network.processes(name) for name in ("core", *MACHINES)] == [set()] * 3
    finally:
        network.remove()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """The last output line and the checksum of the weights of the same training without mizzen, over loopback."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    _make_table(folder / "table")
    told = {
        "PATH": os.environ["PATH"],
        "MIZZEN_TABLE_DIGITS": str(folder / "table"),
        "MIZZEN_CHECKPOINT_URI": str(folder / "checkpoints"),
        "MIZZEN_CHECKPOINT_INTERVAL_S": "3600",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    command = [sys.executable, *TRAIN.replace("train.py", str(EXAMPLE / "train.py")).split(), "--step-s", "0"]
    ranks = [
        subprocess.Popen(command, env={**told, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True) for rank in (0, 1)
    ]
    said = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], said
    return said[0].splitlines()[-1], _weights(folder / "checkpoints")


def _make_table(folder: Path) -> None:
    subprocess.run([sys.executable, str(EXAMPLE / "make_table.py"), str(folder)], check=True, stdout=subprocess.DEVNULL)


def _weights(checkpoints: Path) -> str:
    """Returns the checksum of the weights in the newest checkpoint."""
    return next(part.checksum for part in list_committed(checkpoints)[0].parts if part.name == "model")


def _gang(name: str, run: str) -> dict[str, Any]:
    """Returns the document of a gang of two tasks with one GPU each, which need both machines."""
    resources = {"accelerators": "a100:1", "cpus": 1, "memory": "256MiB"}
    return {
        "version": 1,
        "name": name,
        "tenant": "vision",
        "tables": [TABLE],
        "checkpoint": {"interval": "1s", "grace": "2s", "keep": 2},
        "limits": {"max_runtime": "10m", "retries": 0},
        "jobs": [{"name": "trainer", "role": "trainer", "tasks": 2, "resources": resources, "run": run}],
    }


def _succeeded(installation: Installation, workload: str) -> bool:
    now = installation.api("workload", workload)
    assert now["phase"] not in ("failed", "cancelled"), (now["reason"], installation.tail())
    return bool(now["phase"] == "succeeded")


def _logs(installation: Installation, workload: str, attempt: int) -> tuple[list[str], list[str]]:
    """Returns both tasks' logs of an ended attempt, once they are complete."""

    def look() -> tuple[list[str], list[str]] | None:
        first, second = (
            installation.api("logs", workload, job="trainer", task=task, attempt=attempt) for task in (0, 1)
        )
        return (first, second) if second and "final weights" in first[-1] else None

    found: tuple[list[str], list[str]] = wait_until(look, "the logs of both tasks are complete")
    return found


@pytest.mark.long
def test_agents_reach_temporal_and_nothing_else(installation: Installation) -> None:
    """Of all ports of the control plane a machine can reach only Temporal's, and an agent listens on no port."""
    listening = installation.network.listening("core")
    assert {("127.0.0.1", port) for port in (DATABASE_PORT, TEMPORAL_PORT, API_PORT)} <= listening
    core = installation.network.address("core")
    for name in MACHINES:
        reached = installation.ask(name, "reachable", core, sorted({port for _, port in listening}))
        assert reached == [TEMPORAL_PORT]
        assert installation.network.listening(name) == set()


def test_gang_trains_across_machines(installation: Installation, uninterrupted: tuple[str, str]) -> None:
    """A gang on two machines trains to the same weights as a run on one machine, and its logs can be read."""
    run = f'exec "$MIZZEN_PYTHON" {TRAIN} --step-s 0'
    workload = installation.api("submit", _gang("across", run), str(EXAMPLE))["id"]
    wait_until(lambda: _succeeded(installation, workload), "the gang succeeds")
    held = installation.api("allocations", workload)
    assert sorted((h["machine"], h["attempt"]) for h in held) == [(machine(name), 1) for name in MACHINES]
    logs = _logs(installation, workload, 1)
    assert [log[0] for log in logs] == ["starting from step 0"] * 2
    assert (logs[0][-1], _weights(installation.bucket / "checkpoints" / workload)) == uninterrupted
    wait_until(lambda: all(installation.leftover(name) == set() for name in MACHINES), "no process of the gang is left")


@pytest.mark.long
def test_gang_survives_a_cut(installation: Installation, uninterrupted: tuple[str, str]) -> None:
    """A gang whose machine is cut off is queued again, and resumes from its checkpoint to the same weights.

    Tasks that still run on the cut-off machine are stopped before the machine is ready again.
    """
    # The first attempt waits 1 s per step, so that it lasts until the cut. A task whose gang breaks does not exit by
    # itself: its agent must kill it.
    train = f'"$MIZZEN_PYTHON" {TRAIN} --step-s $((MIZZEN_ATTEMPT == 1))'
    run = f"{train} || {{ status=$?; test $status = 143 || sleep 600; exit $status; }}"
    network = installation.network
    workload = installation.api("submit", _gang("cut", run), str(EXAMPLE))["id"]
    wait_until(lambda: installation.api("attempts", workload)[0]["checkpoint_step"], "the gang has saved")
    network.cut("b")
    wait_until(lambda: installation.api("attempts", workload)[0]["released_at"], "the gang returns to the queue")
    wait_until(lambda: installation.state_of("b") == "lost", "the machine is lost")
    outcome = installation.api("attempts", workload)[0]["outcome"]
    assert (outcome["code"], outcome["detail"]) == ("machine_lost", {"machine": machine("b")})
    back = [e for e in installation.api("events", workload) if e["kind"] == "workload.pending" and e["attempt"] == 1]
    assert [e["reason"]["code"] for e in back] == ["machine_lost"]
    assert installation.tasks("a", workload, 1) == set()
    assert installation.tasks("b", workload, 1) != set()

    network.join("b")
    wait_until(lambda: installation.state_of("b") == "ready", "the machine is ready again")
    assert installation.tasks("b", workload, 1) == set()
    (stale,) = installation.state_folder("b").attempt(workload, 1).runs()
    stop, end = stale.stop(), stale.exit()
    assert stop is not None and stop.told
    ready = [e for e in installation.api("events") if (e["kind"], e["machine"]) == ("machine.ready", machine("b"))]
    assert end is not None and end.ended_at_s <= datetime.fromisoformat(ready[-1]["at"]).timestamp()

    wait_until(lambda: _succeeded(installation, workload), "the gang succeeds")
    first, *_, last = installation.api("attempts", workload)
    assert last["resumed_step"] >= first["checkpoint_step"] > 0
    held = [h["machine"] for h in installation.api("allocations", workload) if h["attempt"] == last["attempt"]]
    assert sorted(held) == [machine(name) for name in MACHINES]
    logs = _logs(installation, workload, last["attempt"])
    assert [log[0] for log in logs] == [f"resumed from step {last['resumed_step']}"] * 2
    assert (logs[0][-1], _weights(installation.bucket / "checkpoints" / workload)) == uninterrupted
    wait_until(lambda: all(installation.leftover(name) == set() for name in MACHINES), "no process of the gang is left")
