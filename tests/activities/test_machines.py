"""Machines register, are lost and return; their workloads keep running, are stopped or get `machine_lost`."""

from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import select
from temporalio.exceptions import ApplicationError

from agent import sealed
from domain.phases import Phase
from domain.protocol.machines import GpuFault
from domain.reasons import Reason, ReasonCode
from infra.db.models import Cluster, Machine
from infra.keys import load_master_key
from tests.activities.invariants import check
from tests.activities.world import GIB, World, job

M = "r/c/m"


@pytest.fixture
def fleet(world: World) -> World:
    """One region without machines."""
    world.region("r")
    return world


def _row(world: World) -> Machine:
    with world.session() as session:
        return session.get_one(Machine, M)


def test_a_new_machine(fleet: World) -> None:
    """A machine joins at its first registration, in a new cluster, and is ready once its workflow reports it."""
    hello = fleet.hello(M, 4, runs=["wl-old.3"])
    wakes = fleet.put_out("wake")
    welcome = fleet.machines.register(hello)
    assert welcome.stop == ["wl-old.3"]
    assert welcome.heartbeat_timeout_s == fleet.settings.lifecycle.heartbeat_timeout_s
    row = _row(fleet)
    assert (row.state, row.gpus, row.free_cpus_milli, row.free_memory_bytes) == ("joining", 4, 16_000, 64 * GIB)
    with fleet.session() as session:
        assert [(c.region, c.name) for c in session.scalars(select(Cluster))] == [("r", "c")]
    workload = fleet.submit()
    fleet.tick()
    assert fleet.waiting(workload) == ["no_hardware r"]
    fleet.machines.ready(fleet.attend(M))
    fleet.machines.ready(fleet.attend(M))
    assert len(fleet.events(kind="machine.ready")) == 1 and fleet.put_out("wake") == wakes + 2
    assert fleet.tick().awarded == 1
    assert fleet.machines.register(hello) == welcome


def test_an_unknown_isolation_is_refused(fleet: World) -> None:
    """A machine says it itself, and schedulers compare it: no machine may stop the placement of others' work."""
    with pytest.raises(ApplicationError, match="isolation: 'strong': must be none, user, sandbox"):
        fleet.machines.register(fleet.hello(M, 4, isolation="strong"))


def test_the_isolation_of_tasks(fleet: World) -> None:
    """The mode of the last registration is stored, with the reason why it is not a stronger one."""
    for mode, told, stored in (("user", "no mounts\0" + "x" * 999, "no mounts" + "x" * 191), ("sandbox", "", None)):
        fleet.machines.register(fleet.hello(M, 4, isolation=mode, isolation_why=told))
        assert (_row(fleet).isolation, _row(fleet).isolation_why) == (mode, stored)


def test_an_agent_that_restarts_keeps_its_runs(fleet: World) -> None:
    """If only the agent restarts, the machine stays ready: live runs go on, and other runs are to be stopped."""
    fleet.machine(M)
    workload, over = fleet.running(), fleet.running()
    fleet.release(over, Phase.SUCCEEDED)
    fleet.delivered()
    welcome = fleet.machine(M, runs=[f"{workload}.1", f"{over}.1", f"{workload}.0"], address="10.1.1.1")
    assert welcome.stop == sorted([f"{over}.1", f"{workload}.0"])
    assert (_row(fleet).state, _row(fleet).address) == ("ready", "10.1.1.1")
    assert [m["kind"] for m in fleet.mail(workload)] == ["awarded"]
    assert len(fleet.events(kind="machine.ready")) == 1


def test_a_machine_that_was_rebooted_has_lost_its_gangs(fleet: World) -> None:
    """After a reboot each workload gets one `machine_lost`, and the machine gets no work before it is ready."""
    fleet.machine(M)
    workload = fleet.running()
    hello = fleet.hello(M, incarnation="boot-2", runs=[f"{workload}.1"])
    for _ in range(2):
        assert fleet.machines.register(hello).stop == [f"{workload}.1"]
        assert _row(fleet).state == "joining"
        assert fleet.mail(workload, "machine_lost") == [
            {"kind": "machine_lost", "attempt": 1, "detail": {"machine": M}}
        ]
    fleet.machines.ready(fleet.attend(M, "boot-1"))
    assert _row(fleet).state == "joining"
    fleet.machines.ready(fleet.attend(M, "boot-2"))
    assert (_row(fleet).state, _row(fleet).lost_at) == ("ready", None)
    fleet.release(workload, Phase.PENDING, blames=M)
    assert fleet.tick().awarded == 1
    check(fleet)


def test_a_lost_machine_and_its_gangs(fleet: World) -> None:
    """A loss is reported once to each workload that holds or awaits slots there, however often it is reported."""
    fleet.tenant("high", level=1)
    fleet.machine(M)
    low = fleet.running(job(gpus=4))
    high = fleet.submit(job(gpus=4), tenant="high")
    fleet.tick()
    for _ in range(2):
        fleet.machines.lost(fleet.attend(M))
    assert (_row(fleet).state, len(fleet.events(kind="machine.lost"))) == ("lost", 1)
    for workload in (low, high):
        assert len(fleet.mail(workload, "machine_lost")) == 1
    fleet.release(low, Phase.PENDING, blames=M)
    fleet.release(high, Phase.PENDING, blames=M)
    assert fleet.masks(M) == (0, 0)
    fleet.tick()
    assert fleet.waiting(high) == ["no_hardware r"]
    check(fleet)


def test_a_loss_of_an_earlier_boot_is_no_news(fleet: World) -> None:
    """A late report that an earlier boot was lost changes nothing."""
    fleet.machine(M, incarnation="boot-1")
    fleet.machine(M, incarnation="boot-2")
    before = fleet.dump()
    fleet.machines.lost(fleet.attend(M, "boot-1"))
    assert fleet.dump() == before


def test_a_machine_that_comes_back_after_it_was_lost_stops_everything(fleet: World) -> None:
    """Runs that survived a network partition are stopped before the machine is ready, even if not yet released."""
    fleet.machine(M)
    slow, released, unheard = fleet.running(), fleet.running(), fleet.running()
    fleet.machines.lost(fleet.attend(M))
    fleet.release(released, Phase.PENDING, blames=M, silent=[M])
    hello = fleet.hello(M, runs=[f"{slow}.1", f"{released}.1"])
    everything = sorted([f"{slow}.1", f"{released}.1", f"{unheard}.1"])
    for _ in range(2):  # a registration may run twice
        assert fleet.machines.register(hello).stop == everything
    fleet.machines.ready(fleet.attend(M, stop=everything))
    assert _row(fleet).state == "ready"
    # Attempts released only now were stopped already: no further stop is requested.
    for late in (slow, unheard):
        fleet.release(late, Phase.PENDING, blames=M, silent=[M])
    assert (_row(fleet).state, fleet.unconfirmed()) == ("ready", [])
    assert fleet.machines.register(fleet.hello(M)).stop == []
    check(fleet)


def test_a_machine_on_which_tasks_may_still_run_takes_no_work(fleet: World) -> None:
    """If a workload is released without a response of an agent, its machine gets no work until the tasks have ended."""
    fleet.machine(M)
    gone, stays = fleet.running(), fleet.running()
    fleet.release(gone, Phase.PENDING, blames=M, silent=[M])
    assert (_row(fleet).state, fleet.masks(M)) == ("joining", (0b10, 0))
    assert fleet.unconfirmed() == [(M, f"{gone}.1")]
    assert fleet.mail(stays, "machine_lost") == []
    fleet.tick()
    assert fleet.waiting(gone) == ["no_hardware r"]
    fleet.machines.ready(fleet.attend(M))
    assert _row(fleet).state == "joining"
    for _ in range(2):
        fleet.machines.ready(fleet.attend(M, stop=[f"{gone}.1"]))
        assert _row(fleet).state == "ready"
    assert fleet.tick().awarded == 1
    check(fleet)


def test_what_was_given_up_after_a_hello_is_stopped_too(fleet: World) -> None:
    """A run that is released during its machine's registration is stopped before the machine is ready."""
    fleet.machine(M)
    first, second = fleet.running(), fleet.running()
    fleet.release(first, Phase.PENDING, silent=[M])
    welcome = fleet.machines.register(fleet.hello(M, runs=[f"{first}.1", f"{second}.1"]))
    assert welcome.stop == [f"{first}.1"]
    fleet.release(second, Phase.PENDING, silent=[M])
    fleet.machines.ready(fleet.attend(M, stop=welcome.stop))
    assert _row(fleet).state == "joining"
    assert fleet.unconfirmed() == [(M, f"{first}.1"), (M, f"{second}.1")]
    assert fleet.machines.register(fleet.hello(M)).stop == [f"{second}.1"]
    fleet.machines.ready(fleet.attend(M, stop=[f"{second}.1"]))
    assert _row(fleet).state == "ready"
    check(fleet)


def test_an_heir_of_what_may_still_run_is_told_before_it_starts(fleet: World) -> None:
    """If a victim's machine is silent, its evictor gets `machine_lost` before `slots_ready`."""
    fleet.tenant("high", level=1)
    fleet.machine(M)
    low = fleet.running(job(gpus=4))
    high = fleet.submit(job(gpus=4), tenant="high")
    fleet.tick()
    fleet.release(low, Phase.PENDING, silent=[M])
    assert [m["kind"] for m in fleet.mail(high)] == ["awarded", "machine_lost", "slots_ready"]
    fleet.release(high, Phase.PENDING)
    assert fleet.unconfirmed() == [(M, f"{low}.1")]
    check(fleet)


@pytest.mark.parametrize("more", [{"gpus": 8}, {"cpus_milli": 99_000}, {"memory_bytes": 99 * GIB}])
def test_a_machine_that_grew(fleet: World, more: dict[str, Any]) -> None:
    """More GPUs, CPUs or memory are usable from the next registration, next to held slots."""
    fleet.machine(M)
    fleet.running(job(gpus=3, cpus_milli=1000))
    fleet.machine(M, **more)
    row = _row(fleet)
    for name, value in more.items():
        assert getattr(row, name) == value
    assert (row.state, row.held) == ("ready", 0b111)
    check(fleet)


@pytest.mark.parametrize("less", [{"gpus": 2}, {"cpus_milli": 500}, {"memory_bytes": 1 << 19}])
@pytest.mark.parametrize("incarnation", ["boot-1", "boot-2"])
def test_a_machine_that_became_too_small(fleet: World, less: dict[str, Any], incarnation: str) -> None:
    """A machine with less than is held there gets no work until the allocations end.

    If it was rebooted, its workloads get `machine_lost`.
    """
    fleet.machine(M)
    workload = fleet.running(job(gpus=3, cpus_milli=1000))
    hello = fleet.hello(M, **less, incarnation=incarnation, runs=[f"{workload}.1"])
    for _ in range(2):
        with pytest.raises(ApplicationError, match="less than is held on it") as caught:
            fleet.machines.register(hello)
        assert not caught.value.non_retryable
        assert _row(fleet).state == "joining"
    assert len(fleet.mail(workload, "machine_lost")) == (incarnation == "boot-2")
    check(fleet)
    fleet.release(workload, Phase.PENDING)
    fleet.machines.register(hello)
    fleet.machines.ready(fleet.attend(M, incarnation))
    row = _row(fleet)
    assert row.state == "ready" and all(getattr(row, name) == value for name, value in less.items())
    check(fleet)


def test_a_hello_that_cannot_be(fleet: World) -> None:
    """What no machine has is refused for good, an unknown region until it exists; none writes a row."""
    before = fleet.dump()
    for hello, words in (
        (fleet.hello(M, 63), "gpus: 63 is not between 0 and 62"),
        (fleet.hello(M, -1), "gpus: -1 is not between 0 and 62"),
        (fleet.hello(M, cpus_milli=0), "cpus_milli: 0 is not between 1 and 10000000"),
        (fleet.hello(M, cpus_milli=10_000_001), "cpus_milli: 10000001 is not between 1 and 10000000"),
        (fleet.hello(M, memory_bytes=-1), "memory_bytes: -1 is not between 1 and"),
        (fleet.hello(M, memory_bytes=1 << 60), f"memory_bytes: {1 << 60} is not between 1 and {1 << 50}"),
        (fleet.hello(M, withheld=-1), "withheld: -1 is not between 0 and"),
        (fleet.hello(M, gpu_fault=GpuFault(-1, "GPU-1", "Xid 79", 1.0)), "gpu_fault: slot -1 at 1"),
        (fleet.hello(M, gpu_fault=GpuFault(1, "GPU-1", "Xid\n79", 1.0)), "gpu_fault.error: .*all printable"),
        (fleet.hello(M, rack="r" * 201), "rack: 'rrr.*at most 200 characters, all printable"),
        (fleet.hello(M, gpu_type="a\n100"), "gpu_type: .*all printable"),
        (fleet.hello(M, incarnation="b" * 201), "incarnation: .*at most 200 characters"),
        (fleet.hello(M, address="10.0.0.1 weight 9"), "address: '10.0.0.1 weight 9': must be an IP address or a host"),
        (fleet.hello(M, address="fe80::1%eth0"), "address: 'fe80::1%eth0'"),
        (fleet.hello(M, public_key="AAAA"), "public_key: 'AAAA': must be the 32 bytes of an X25519 key in base64"),
        (fleet.hello(M, public_key="key?"), "public_key: 'key.': must be"),
        (fleet.hello(M, runs=["wl-1.1", "wl-1.x"]), "runs: 'wl-1.x': must be WORKLOAD.ATTEMPT"),
        (fleet.hello(M, runs=["wl-1.1"] * 1001), "runs: has 1001 entries; must have at most 1000"),
    ):
        with pytest.raises(ApplicationError, match=words) as caught:
            fleet.machines.register(hello)
        assert caught.value.non_retryable
    with pytest.raises(ApplicationError, match="region moon does not exist") as caught:
        fleet.machines.register(fleet.hello("moon/c/m"))
    assert not caught.value.non_retryable
    assert fleet.dump() == before


def test_a_cordon_outlives_a_boot(fleet: World) -> None:
    """An operator's cordon still holds after a reboot."""
    fleet.machine(M)
    fleet.alter(Machine, M, cordon={"code": "cordoned_by_operator", "detail": {}}, draining=True, failed_gangs=1)
    fleet.machines.lost(fleet.attend(M))
    fleet.machine(M, incarnation="boot-2")
    row = _row(fleet)
    assert row.state == "ready" and row.cordon is not None and row.draining and row.failed_gangs == 1


def test_a_removed_machine_is_gone_at_once_and_comes_back_as_new(world: World) -> None:
    """A deleted machine gets no work from the next pass on; late reports are ignored; a registration recreates it."""
    world.region("r")
    world.machine("r/c/m")
    world.tick()
    world.alter(Machine, "r/c/m", draining=True, failed_gangs=2)
    with world.session() as session:
        session.delete(session.get_one(Machine, "r/c/m"))
    world.machines.ready(world.attend("r/c/m"))
    world.machines.lost(world.attend("r/c/m"))
    workload = world.submit()
    world.tick()
    assert world.waiting(workload) == ["no_hardware r"]
    world.machine("r/c/m")
    world.tick()
    assert world.workload(workload).region == "r"
    with world.session() as session:
        row = session.get_one(Machine, "r/c/m")
        assert (row.draining, row.failed_gangs, row.cordon) == (False, 0, None)


# --------------------------------------------------------------------------------------------------------------- keys


def _keys(number: int) -> list[tuple[bytes, str]]:
    private = [sealed.new_key() for _ in range(number)]
    return [(key, sealed.public_key(key)) for key in private]


def test_a_machines_key_is_pinned_at_its_first_hello(fleet: World) -> None:
    """A registration with another key does not replace the pinned key, and takes the machine out of use.

    The machine is usable again after it registers with its own key.
    """
    (_, own), (_, other) = _keys(2)
    fleet.machine(M, public_key=own)
    for _ in range(2):
        welcome = fleet.machines.register(fleet.hello(M, public_key=other, address="6.6.6.6", gpus=8))
        assert welcome.refused and welcome.stop == []
    row = _row(fleet)
    assert (row.public_key, row.offered_key, row.address, row.gpus) == (own, other, "127.0.0.1", 4)
    assert (row.state, (row.cordon or {}).get("code")) == ("joining", "key_not_trusted")
    assert len(fleet.events(kind="machine.key_offered")) == 1
    assert not fleet.machine(M, public_key=own).refused
    row = _row(fleet)
    assert (row.state, row.offered_key, row.cordon) == ("ready", None, None)
    check(fleet)


def test_a_machine_that_holds_both_keys_has_its_new_one_accepted(fleet: World) -> None:
    """An agent with both keys can answer the challenge; no other agent can, and the answer fits no other key."""
    load_master_key(fleet.settings.master_key_path, create=True)
    (old, old_public), (new, new_public), (thief, stolen) = _keys(3)
    fleet.machine(M, public_key=old_public)
    welcome = fleet.machines.register(fleet.hello(M, public_key=new_public))
    assert welcome.refused and welcome.challenge is not None
    for private in ([thief], [thief, new], [old]):
        with pytest.raises(sealed.CannotUnseal):
            sealed.prove(M, private, welcome.challenge)
    with pytest.raises(sealed.CannotUnseal):
        sealed.prove("r/c/other", [new, old], welcome.challenge)
    proof = sealed.prove(M, [new, old], welcome.challenge)
    assert fleet.machines.register(fleet.hello(M, public_key=stolen, key_proof=proof)).refused
    assert _row(fleet).public_key == old_public
    # The agent signs no proof for a key that is not its own, even if another agent announced that key.
    forged = fleet.machines.register(fleet.hello(M, public_key=stolen))
    assert forged.challenge is not None
    with pytest.raises(sealed.CannotUnseal):
        sealed.prove(M, [new, old], forged.challenge)
    assert not fleet.machines.register(fleet.hello(M, public_key=new_public, key_proof=proof)).refused
    row = _row(fleet)
    assert (row.public_key, row.offered_key, row.cordon) == (new_public, None, None)
    assert len(fleet.events(kind="machine.key_changed")) == 1


def test_a_machine_that_only_comes_with_another_key_counts_as_lost(fleet: World) -> None:
    """A machine that registers only with another key is lost after the timeout of silent machines."""
    (_, own), (_, other) = _keys(2)
    fleet.machine(M, public_key=own)
    workload = fleet.running()
    fleet.machines.register(fleet.hello(M, public_key=other, incarnation="boot-2"))
    assert fleet.mail(workload, "machine_lost") == []
    fleet.alter(Machine, M, offered_at=datetime(2026, 1, 1, tzinfo=UTC))
    for _ in range(2):
        fleet.machines.register(fleet.hello(M, public_key=other, incarnation="boot-2"))
    assert len(fleet.mail(workload, "machine_lost")) == 1
    assert _row(fleet).state == "lost"


def test_a_lent_machine_that_claims_much_waits_for_an_operator(fleet: World) -> None:
    """More GPUs than `lent_gpus` need an operator, once for each claim; machines that are not lent do not."""
    limit = fleet.settings.lifecycle.lent_gpus
    fleet.machine("r/own/m", limit + 1)
    with fleet.session() as session:
        assert session.get_one(Machine, "r/own/m").cordon is None
        session.add(Cluster(region="r", name="c", capacity="voluntary"))
    fleet.machine(M, limit)
    assert _row(fleet).cordon is None
    fleet.machine(M, limit + 1)
    cordon = _row(fleet).cordon
    assert cordon is not None and cordon["code"] == "claims_too_much"
    assert cordon["detail"] == {"gpus": limit + 1, "limit": limit}
    fleet.alter(Machine, M, cordon=None)
    fleet.machine(M, limit + 1)
    assert _row(fleet).cordon is None, "an operator has admitted this claim"
    fleet.machine(M, limit + 2)
    assert _row(fleet).cordon is not None


def test_a_fault_of_a_gpu_cordons_the_machine_once(fleet: World) -> None:
    """The cordon has the fault as its reason. Its repetition does not restore it, and an operator's cordon stays."""
    fleet.machine(M)
    first, second = (GpuFault(2, "GPU-c", error, at_s) for error, at_s in (("Xid 79: lost", 5e9), ("Xid 48: bad", 6.0)))
    fleet.machine(M, gpu_fault=first)
    cordon = _row(fleet).cordon
    assert cordon is not None and cordon["code"] == "gpu_fault"
    assert Reason.from_json(cordon).sentence.startswith(
        "GPU 2 (GPU-c) has failed: Xid 79: lost; `mizzen machines uncordon`"
    )
    fleet.alter(Machine, M, cordon=None)
    fleet.machine(M, gpu_fault=first)
    assert _row(fleet).cordon is None, "an operator has removed it"
    other = Reason(ReasonCode.PLATFORM_NOTICE, {"machine": M}).to_json()
    fleet.alter(Machine, M, cordon=other, notice=other)
    fleet.machine(M, gpu_fault=second)
    cordon = _row(fleet).cordon
    assert cordon is not None and cordon["detail"]["error"] == "Xid 48: bad"
    fleet.machine(M, incarnation="boot-2")
    assert _row(fleet).cordon == cordon, "a machine that returns may still have the fault"
    operators = Reason(ReasonCode.CORDONED_BY_OPERATOR, {"by": "op"}).to_json()
    fleet.alter(Machine, M, cordon=operators)
    fleet.machine(M, gpu_fault=first)
    assert _row(fleet).cordon == operators
