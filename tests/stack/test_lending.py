"""Owners take machines back on a whole stack, and gangs go on elsewhere."""

import re
from pathlib import Path

import pytest

from mizzen.checkpoint import list_committed
from tests.stack.harness import Up, owner_says, wait_until

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]


def _steps(up: Up, workload: str, words: str) -> list[int]:
    """Returns the steps that the first task wrote to its output after these words, in the order of the attempts."""
    numbers = range(1, len(up.client().attempts(workload)) + 1)
    lines = [line for number in numbers for line in up.client().logs(workload, attempt=number, task=0)]
    text = b"\n".join(lines).decode()
    return [int(step) for step in re.findall(rf"{words} at step (\d+)", text)]


@pytest.mark.parametrize("how", [("--notice", "20s"), ("--now",)], ids=["notice", "now"])
def test_a_gang_leaves_the_machine_that_its_owner_takes(shared: Up, tmp_path: Path, how: tuple[str, ...]) -> None:
    """With notice it loses no step, and without at most the work since its last checkpoint.

    The owner is told 'free' when no task runs there; the machine takes work again when the owner lends it.
    """
    workload = shared.submit(f"lent-{len(how)}", 100_000, 0.05, gate=tmp_path / "gate")
    wait_until(lambda: (shared.saved_step(workload) or 0) > 0, "the workload has saved")
    (machine,) = shared.machines_of(workload)
    saved = shared.saved_step(workload) or 0
    status = owner_says(shared, machine, "reclaim", *how)
    assert (status["free"], status["running"]) == (True, [])
    wait_until(lambda: len(shared.client().attempts(workload)) == 2, "the next attempt is awarded")
    wait_until(lambda: shared.phase(workload) == "running", "the next attempt runs")
    assert shared.machines_of(workload) != [machine]
    first = shared.client().attempts(workload)[0]
    outcome = first["outcome"]
    assert outcome is not None
    assert (outcome["code"], outcome["detail"]["platform"]) == ("platform_notice", "owner")
    wait_until(lambda: len(_steps(shared, workload, "starting")) == 2, "the next attempt has begun")
    resumed = _steps(shared, workload, "starting")[1]
    if how[0] == "--notice":
        wait_until(lambda: _steps(shared, workload, "stopped"), "the output of the first attempt has arrived")
        assert [resumed] == _steps(shared, workload, "stopped")
    assert resumed >= saved
    assert not shared.takes_work(machine)
    assert owner_says(shared, machine, "lend")["lent"]
    wait_until(lambda: shared.takes_work(machine), "the machine takes work again")
    shared.client().cancel(workload)
    wait_until(lambda: shared.phase(workload) == "cancelled", "the workload has ended")


@pytest.mark.rotating
def test_one_gpu_of_four_is_taken(shared: Up, tmp_path: Path) -> None:
    """The gang on this GPU goes on elsewhere; gangs on the other GPUs of the machine run on in their first attempt."""
    gate = tmp_path / "gate"
    workloads = [shared.submit(f"one-gpu-{number}", 100_000, 0.05, gate=gate) for number in range(4)]
    wait_until(lambda: all(shared.saved_step(one) for one in workloads), "all workloads have saved")
    slots = {one: shared.client().allocations(one)[0] for one in workloads}
    machines = [held["machine"] for held in slots.values()]
    machine = max(machines, key=machines.count)
    here = [one for one in workloads if slots[one]["machine"] == machine]
    assert len(here) > 1
    gpu = str(slots[here[0]]["slots"][0])
    status = owner_says(shared, machine, "reclaim", "--notice", "10s", "--gpus", gpu)
    assert (status["free"], list(status["gpus_at_s"]), len(status["running"])) == (True, [gpu], len(here) - 1)
    wait_until(lambda: len(shared.client().attempts(here[0])) == 2, "the gang is awarded again")
    wait_until(lambda: shared.phase(here[0]) == "running", "the gang runs again")
    after = next(one for one in shared.client().allocations(here[0]) if one["attempt"] == 2)
    assert after["machine"] != machine or str(after["slots"][0]) != gpu
    row = next(one for one in shared.client().machines() if one["id"] == machine)
    assert (row["slots_withheld"], row["cordon"]) == ([int(gpu)], None)
    assert owner_says(shared, machine, "lend")["lent"]
    gate.touch()
    for one in workloads:
        shared.client().cancel(one)
    wait_until(lambda: {shared.phase(one) for one in workloads} == {"cancelled"}, "all workloads have ended")
    assert [len(shared.client().attempts(one)) for one in here[1:]] == [1] * (len(here) - 1)


@pytest.mark.rotating
def test_a_gang_moves_between_buildings_with_stores(shared: Up, tmp_path: Path) -> None:
    """Reclaimed with notice, a gang saves in its building's store, and continues in the other building, without losing
    a step, with the store there; then it comes back.
    """
    client = shared.client()
    stores = {building: tmp_path / building for building in ("physics", "chemistry")}
    for building, folder in stores.items():
        folder.mkdir()
        client.set_cluster("east", building, store_url=folder.as_uri(), capacity="voluntary")
    client.set_tenant("t", 3, {"a100": 16, "l4": 4}, None)
    workload = shared.submit(
        "buildings", 100_000, 0.05, tasks=2, gate=tmp_path / "gate", gpu="l4", capacity=["voluntary"]
    )

    def saved(building: str, attempt: int) -> list[int]:
        found = list_committed(str(stores[building] / "checkpoints" / workload))
        return [one.step for one in found if one.attempt == attempt]

    visited = []
    for attempt in (1, 2):
        wait_until(lambda: shared.phase(workload) == "running", "the gang runs")
        (machine,) = set(shared.machines_of(workload))
        building = machine.split("/")[1]
        visited.append(building)
        wait_until(lambda b=building, a=attempt: saved(b, a), "the gang has saved in the store of its building")
        assert owner_says(shared, machine, "reclaim", "--notice", "20s")["free"]
        other = next(one for one in stores if one != building)
        if attempt == 2:
            assert shared.takes_work(f"east/{other}/m")
        wait_until(lambda a=attempt: len(client.attempts(workload)) == a + 1, "the next attempt is awarded")
        assert owner_says(shared, machine, "lend")["lent"]
        wait_until(lambda o=other, a=attempt: saved(o, a + 1), "the next attempt has saved in the other store")
        # Agents upload the output at intervals.
        wait_until(lambda a=attempt: len(_steps(shared, workload, "starting")) > a, "the output has arrived")
        wait_until(lambda a=attempt: len(_steps(shared, workload, "stopped")) >= a, "the earlier output, too")
        assert _steps(shared, workload, "starting")[attempt] == _steps(shared, workload, "stopped")[attempt - 1]
        assert saved(building, attempt)[0] == _steps(shared, workload, "stopped")[attempt - 1]
        assert not saved(building, attempt + 1)
        assert client.workload(workload)["checkpoint_store"] == stores[other].as_uri()
        wait_until(lambda m=machine: shared.takes_work(m), "the machine takes work again")
    assert visited == [other, building]
    client.cancel(workload)
    wait_until(lambda: shared.phase(workload) == "cancelled", "the workload has ended")
    for building in stores:
        client.set_cluster("east", building, store_url=None)
    assert not (shared.data / "buckets" / "east" / "checkpoints" / workload).exists()
