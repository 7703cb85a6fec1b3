"""Policies on fleets so small that the outcome can be computed by hand."""

from collections.abc import Sequence
from dataclasses import replace
from math import inf

import pytest

from domain.scheduling import TenantState
from gms.auction import region_bidder
from gms.auction.candidate import AuctionOutcome, Candidate
from infra.errors import ConfigurationError
from research.rivals.policies import ALL_POLICIES
from simulation.policies import POLICIES, policies
from simulation.run import Run
from simulation.workloads import SimulatedWorkload
from tests.simulation.scenarios import SURE, happenings, machines, scenario, tenant, when, where, workload


def test_global_waits_nowhere_and_runs_where_there_is_room() -> None:
    """Late binding: three one-machine gangs run immediately on three machines of two regions."""
    scene = scenario(machines("east", 1) + machines("west", 2), [workload(f"w{k}") for k in range(3)])
    run, seen = happenings(scene)
    assert when(seen, "finished") == {"w0": 1000, "w1": 1000, "w2": 1000}
    assert sorted(where(seen).values()) == ["east", "west", "west"]
    assert run.simulator.progress.finished == 3


def test_federated_queues_behind_a_busy_region_while_another_is_idle() -> None:
    """Early binding: a gang stays in its region although the other region is idle long before."""
    work = [
        workload("long", duration_s=9000),
        workload("short", duration_s=10, submit_s=1),
        workload("third", submit_s=2),
    ]
    states = machines("east", 1) + machines("west", 1)
    early, late = happenings(scenario(states, work), "federated")[1], happenings(scenario(states, work), "global")[1]
    # Regions are bound by demand over supply: east has 8/8 and west 8/8, so the first by name, which is busy for hours.
    assert where(early) == {"long": "east", "short": "west", "third": "east"}
    assert when(early, "awarded")["third"] == 9000
    assert where(late)["third"] == "west"
    assert when(late, "awarded")["third"] == 11


def test_federated_looks_at_demand_over_supply() -> None:
    """A region twice as large gets two gangs before a smaller one gets its second."""
    work = [workload(f"w{k}", submit_s=k) for k in range(4)]
    seen = happenings(scenario(machines("big", 2) + machines("small", 1), work), "federated")[1]
    assert [where(seen)[f"w{k}"] for k in range(4)] == ["big", "small", "big", "big"]


def test_federated_binds_to_places_that_could_hold_the_gang() -> None:
    """A gang of two machines is never bound to a region with one machine."""
    work = [workload("gang", tasks=2), workload("second", tasks=2, submit_s=5)]
    seen = happenings(scenario(machines("a-small", 1) + machines("b-large", 2), work), "federated")[1]
    assert where(seen) == {"gang": "b-large", "second": "b-large"}
    assert when(seen, "awarded")["second"] == 1000


def test_a_preempted_workload_stays_bound() -> None:
    """A workload that was evicted in its region waits there, although another region is free."""
    low = workload("low", level=4, submit_s=0)
    filler = workload("filler", submit_s=1, duration_s=20)
    high = workload("high", level=1, submit_s=30, regions=frozenset({"east"}))
    states = machines("east", 1) + machines("west", 1)
    early, late = (
        happenings(scenario(states, [low, filler, high]), "federated")[1],
        happenings(scenario(states, [low, filler, high]), "global")[1],
    )
    assert when(early, "evicted") == when(late, "evicted") == {"low": 30}
    assert where(early)["low"] == "east"
    assert when(early, "awarded")["low"] == 1040
    assert where(late)["low"] == "west"
    assert when(late, "awarded")["low"] == 40


def test_cluster_binds_to_a_cluster() -> None:
    """Two one-machine gangs are bound to the clusters of a region in turn, and the third waits in the first."""
    states = machines("east", 1, cluster="c1") + machines("east", 1, cluster="c2")
    work = [workload(f"w{k}", submit_s=k) for k in range(3)]
    seen = happenings(scenario(states, work), "cluster")[1]
    assert where(seen) == {"w0": "east/c1", "w1": "east/c2", "w2": "east/c1"}


def test_fifo_blocks_on_its_head_and_evicts_nobody() -> None:
    """A small workload waits behind a large one, whatever its priority, and no workload is evicted."""
    work = [
        workload("first", gpus=4, submit_s=0, duration_s=500, level=7),
        workload("large", gpus=8, submit_s=1, duration_s=100, level=7),
        workload("small", gpus=4, submit_s=2, duration_s=100, level=1),
    ]
    run, seen = happenings(scenario(machines("east", 1), work), "fifo")
    assert when(seen, "awarded") == {"first": 0, "large": 500, "small": 600}
    assert run.meter.total.preemptions == 0
    assert when(happenings(scenario(machines("east", 1), work), "global")[1], "awarded")["small"] == 2


def test_a_higher_priority_evicts_a_lower_one() -> None:
    """The award is immediate; the victim keeps its slots during its eviction, then the evictor starts."""
    work = [workload("low", level=4), workload("high", level=2, submit_s=100, duration_s=50)]
    seen = happenings(scenario(machines("east", 1), work))[1]
    assert when(seen, "awarded")["high"] == when(seen, "evicted")["low"] == 100
    assert when(seen, "left")["low"] == when(seen, "started")["high"] == 110
    assert when(seen, "finished") == {"high": 160, "low": 160 + 900}


def test_over_quota_work_runs_and_gives_way() -> None:
    """An over-quota workload runs while there is space, and is evicted by a workload within quota."""
    tenants = [tenant("nlp", a100=8), tenant("vision", a100=8)]
    work = [
        workload("in", tenant="vision", duration_s=5000),
        workload("over", tenant="vision", submit_s=1, duration_s=5000),
        workload("owner", tenant="nlp", submit_s=100, duration_s=50),
    ]
    run, seen = happenings(scenario(machines("east", 2), work, tenants))
    assert when(seen, "evicted") == {"over": 100}
    assert run.meter.total.until["award"].judged == {(4, False): 2, (4, True): 2}


def _sweep_and_urgent(owner: str) -> tuple[list[SimulatedWorkload], list[TenantState]]:
    """Returns a level 7 sweep that uses its tenant's whole quota, and an urgent workload of `owner` an hour later."""
    sweep = workload("sweep", level=7, duration_s=360_000)
    urgent = workload("urgent", level=1, submit_s=3600, duration_s=600, tenant=owner)
    return [sweep, urgent], [tenant("vision", a100=8), tenant("nlp", a100=8)]


@pytest.mark.parametrize("owner", ["vision", "nlp"])
def test_urgent_work_evicts_its_own_tenants_sweep(owner: str) -> None:
    """Quota goes to the most important level first, so an urgent workload evicts a sweep of any tenant."""
    run, seen = happenings(scenario(machines("east", 1), *_sweep_and_urgent(owner)))
    assert when(seen, "evicted") == {"sweep": 3600}
    assert when(seen, "awarded")["urgent"] == 3600
    assert run.meter.total.until["award"].judged == {(1, False): 1}


def test_an_award_takes_quota_from_its_own_tenant_only() -> None:
    """An urgent workload evicts the sweep of its own tenant, although another tenant's sweep has run for longer."""
    work, tenants = _sweep_and_urgent("vision")
    other = workload("other", level=7, duration_s=360_000, tenant="nlp")
    work[0] = workload("sweep", level=7, submit_s=100, duration_s=360_000)
    seen = happenings(scenario(machines("east", 2), [other, *work], tenants))[1]
    assert when(seen, "evicted") == {"sweep": 3600}


def test_what_an_award_made_over_quota_gives_way_at_once() -> None:
    """If an urgent workload gets a free machine, its tenant's sweep becomes over-quota and is evicted in seconds."""
    work, tenants = _sweep_and_urgent("vision")
    short = workload("short", level=7, submit_s=10, duration_s=3590, tenant="nlp")
    waits = workload("waits", level=7, submit_s=20, duration_s=600, tenant="third")
    seen = happenings(scenario(machines("east", 2), [*work, short, waits], [*tenants, tenant("third", a100=8)]))[1]
    assert when(seen, "finished")["short"] == 3600
    assert when(seen, "awarded")["urgent"] == 3600
    assert when(seen, "evicted") == {"sweep": 3601}
    assert when(seen, "awarded")["waits"] == 3601


def test_an_urgent_gang_that_cannot_be_placed_changes_no_rank() -> None:
    """As long as an urgent gang is not awarded, its tenant's sweep keeps its rank and is not evicted."""
    work, tenants = _sweep_and_urgent("vision")
    gang = workload("urgent", level=1, submit_s=3600, duration_s=600, tasks=2)
    keeper = workload("keeper", level=1, duration_s=20_000, tenant="nlp")
    waits = workload("waits", level=7, submit_s=4000, duration_s=600, tenant="third")
    tenants = [tenant("vision", a100=16), tenants[1], tenant("third", a100=8)]
    seen = happenings(scenario(machines("east", 2), [work[0], gang, keeper, waits], tenants, until_s=19_000.0))[1]
    assert when(seen, "awarded") == {"sweep": 0, "keeper": 0}
    assert when(seen, "evicted") == {}


def test_policies_by_name() -> None:
    """`all` means MAST's policies and fifo, each once. The error for an unknown policy lists the known ones."""
    ours = list(POLICIES)
    assert [policy.name for policy in policies(["fifo", "all"])] == ["fifo", *(p for p in ours if p != "fifo")]
    assert [policy.name for policy in policies(["slurm", "kueue"], ALL_POLICIES)] == ["slurm", "kueue"]
    with pytest.raises(ConfigurationError, match="--policy best: must be one of global, federated"):
        policies(["best"])


@pytest.mark.parametrize("known", [False, True])
def test_a_large_gang_does_not_starve_behind_a_stream_of_small_work(
    known: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gang that has waited an hour reserves freed slots and starts once running workloads have ended.

    If their ends are not known, it does so after a day, which is shortened here to two hours. Over-quota, it waits.
    """
    monkeypatch.setattr(region_bidder, "STARVED_S", 7200.0)
    at_most_s = 3600.0 if known else inf
    small = [replace(workload(f"small{k:03d}", 1, 200.0 * k, 3600), max_runtime_s=at_most_s) for k in range(150)]
    gang = replace(workload("gang", 8, 1000, 100, tasks=2), max_runtime_s=100.0 if known else inf)
    tenants = [tenant("vision", a100=1000)]
    awarded = when(happenings(scenario(machines("east", 2), [*small, gang], tenants))[1], "awarded")
    after_s = 3600 if known else 7200
    assert 1000 + after_s < awarded["gang"] <= 1000 + after_s + 3600 + 300
    tenants = [tenant("vision", a100=0)]
    assert when(happenings(scenario(machines("east", 2), [*small, gang], tenants))[1], "awarded")["gang"] > 30_000


def test_an_over_quota_gang_keeps_nothing_from_work_within_quota() -> None:
    """An over-quota gang never reserves resources against work within quota, however long it has waited."""
    small = [workload(f"small{k:03d}", 1, 200.0 * k, 3600, tenant="nlp") for k in range(100)]
    gang = workload("gang", 8, 1000, 100, tasks=2)
    tenants = [tenant("nlp", a100=1000), tenant("vision", a100=0)]
    with_gang, without = (
        when(happenings(scenario(machines("east", 2), work, tenants))[1], "awarded") for work in ([*small, gang], small)
    )
    assert with_gang["gang"] > 20_000
    assert {name: at_s for name, at_s in with_gang.items() if name != "gang"} == without


def test_a_gang_that_fits_nowhere_waits_for_ever() -> None:
    """A gang that fits nowhere is bound to no place and judged when its objective expires, and the run still ends."""
    for policy in ("global", "federated", "cluster"):
        run, seen = happenings(scenario(machines("east", 1), [workload("huge", tasks=2, level=1)]), policy)
        assert when(seen, "awarded") == {}
        assert run.meter.total.until["award"].missed == {(1, False): 1}
        assert run.to_json()["run"]["fit_nowhere"] == ["huge"]
        assert run.simulator.now_s == 300


def test_the_end_of_a_protection_starts_a_pass() -> None:
    """An urgent gang evicts when its victim's minimum runtime has passed, not at the next periodic pass; no event
    happens at that time.
    """
    protects = SURE.model_copy(update={"min_runtime_s": 120.0})
    work = [workload("low", level=6, duration_s=9000), workload("urgent", level=3, submit_s=10)]
    awarded = when(happenings(scenario(machines("east", 1), work, settings=protects))[1], "awarded")
    assert awarded["urgent"] == 120


def test_an_evicted_gang_has_waited_since_its_submission(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the live system, an eviction does not begin the wait again that counts for reservations."""
    work = [workload("low", level=6, submit_s=100, duration_s=5000), workload("urgent", level=1, submit_s=600)]
    run = Run(scenario(machines("east", 1), work, until_s=1200), POLICIES["global"])
    waited = {}
    place = run.engine.place

    def seen(candidates: Sequence[Candidate]) -> Sequence[AuctionOutcome]:
        for one in candidates:
            if one.request.workload == "00000000":
                waited[run.simulator.now_s] = one.waited_s
        return place(candidates)

    monkeypatch.setattr(run.engine, "place", seen)
    run.go()
    assert max(waited) > 600 and waited == {now_s: now_s - 100 for now_s in waited}


@pytest.mark.parametrize("plain", [False, True])
def test_a_persons_flood_does_not_delay_a_colleague(plain: bool) -> None:
    """Of 40 one-hour workloads of one person, and a later short one of another, the short one starts after the first.

    How the first person's work is split makes no difference.
    """
    for tasks in (1, 4):
        flood = [
            replace(workload(f"a{n:02d}", gpus=4 // tasks, tasks=tasks, duration_s=3600), user="ann") for n in range(40)
        ]
        late = replace(workload("b", gpus=1, submit_s=60, duration_s=600), user="bob")
        settings = SURE.model_copy(update={"reserve_after_s": inf})
        seen = happenings(scenario(machines("east", 1), [*flood, late], settings=settings), plain=plain)[1]
        assert when(seen, "awarded")["b"] == 3600
