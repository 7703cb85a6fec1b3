"""The replicas of a service stand on different machines, also after one of them is lost; a required spread waits."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agent.fleet import power_off
from server.agents import machine_state_dir
from tests.stack.harness import Up, wait_until

_FLEET = f"""
version: 1
regions:
  - name: east
    clusters:
      - name: a
        machines: [{{name: m, count: 4, gpus: 4, gpu_type: a100, cpus: 16, memory: 16GiB, owner: "{os.getuid()}"}}]
"""


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Up]:
    """A stack with four machines, each of which has room for all replicas."""
    stack = Up(tmp_path, _FLEET, lost_s=8)
    yield stack
    stack.close()


def _document(**service: Any) -> dict[str, Any]:
    return {
        "version": 1,
        "name": "chat",
        "tenant": "t",
        "resources": {"accelerators": "a100:1", "cpus": 0.1, "memory": "64MiB"},
        "run": 'exec "$MIZZEN_PYTHON" -m http.server "$MIZZEN_PORT" --bind 127.0.0.1',
        "service": {"replicas": 3, "readiness_probe": {"path": "/", "interval_seconds": 0.5}, **service},
    }


def _places(up: Up) -> dict[int, str]:
    """Returns the machine of each ready replica, by the replica's number."""
    ready = [one for one in up.client().service_replicas("chat") if one["stage"] == "ready"]
    return {one["number"]: up.machines_of(one["workload"])[0] for one in ready}


def _ready(up: Up, number: int) -> dict[int, str]:
    def found() -> dict[int, str] | None:
        there = _places(up)
        return there if len(there) == number else None

    places: dict[int, str] = wait_until(found, f"{number} replicas are ready")
    return places


@pytest.mark.long
def test_replicas_stand_on_different_machines(up: Up) -> None:
    """Three replicas stand on three of four machines; after the loss of one machine, they do again.

    With a spread that requires racks, replicas wait: all machines are in one rack. `why` names the rack. An update that
    only prefers racks lets them start, and keeps the replica that serves.
    """
    up.start()
    client = up.client()
    client.set_tenant("t", 3, {"a100": 16}, None)
    client.create_service(_document())
    before = _ready(up, 3)
    assert len(set(before.values())) == 3

    lost = before[min(before)]
    power_off(machine_state_dir(up.data, lost))
    wait_until(lambda: lost not in _places(up).values(), "the lost replica is gone")
    after = _ready(up, 3)
    assert len(set(after.values())) == 3 and lost not in after.values()
    assert before.items() - after.items() == {(min(before), lost)}  # The other two stay where they are.

    client.end_service("chat")
    wait_until(lambda: not client.services("t"), "the service has ended")
    client.create_service(_document(spread="rack, required"))
    (first,) = _ready(up, 1).items()
    waiting = [one for one in client.service_replicas("chat") if one["stage"] == "starting"]
    assert len(waiting) == 2
    sentence = f"rack {first[1].rpartition('/')[0].removeprefix('east/')}"
    wait_until(lambda: sentence in str(client.why(waiting[0]["workload"])), "why names the rack")
    client.update_service("chat", _document(spread="rack"))
    places = _ready(up, 3)
    assert places[first[0]] == first[1] and len(set(places.values())) == 3
