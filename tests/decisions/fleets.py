"""Small random regions and requests for RMS, and builders for examples."""

from collections.abc import Mapping
from dataclasses import replace
from random import Random

from hypothesis import strategies as st

from domain.capacity import USUAL, pooled, with_pools
from domain.scheduling import (
    Bid,
    Holding,
    JobRequest,
    MachineState,
    MoveCost,
    PlacementRequest,
    Plan,
    RegionSnapshot,
    RunningWorkload,
)
from domain.spread import SpreadLevel, SpreadRule
from domain.topology import TopologyRule
from gms.auction.auction import Auction, Options
from rms.region import RegionColumns

GIB = 2**30


def machine(
    id_: str,
    gpus: int = 8,
    *,
    used: int = 0,
    gpu_type: str | None = "a100",
    cluster: str = "c1",
    rack: str = "r1",
    cpus_milli: int = 64_000,
    memory_bytes: int = 64 * GIB,
) -> MachineState:
    """Returns a machine on which `used` GPUs and no other resources are held."""
    return MachineState(
        id_, cluster, rack, gpu_type, gpus, gpus - used, cpus_milli, memory_bytes, cpus_milli, memory_bytes
    )


def running(
    id_: str,
    *holdings: tuple[str, int],
    rank: int = 8,
    started_at_s: float = 0.0,
    checkpoint_at_s: float | None = 0.0,
    evictable: bool = True,
) -> RunningWorkload:
    """Returns a running workload that holds only GPUs, given as (machine, number) pairs."""
    held = tuple(Holding(machine_id, gpus, 0, 0) for machine_id, gpus in holdings)
    return RunningWorkload(id_, rank, started_at_s, held, checkpoint_at_s, evictable)


def region(machines: list[MachineState], workloads: list[RunningWorkload] | None = None) -> RegionSnapshot:
    """Returns a region named `here` at 1,000 s."""
    return RegionSnapshot("here", 1000.0, tuple(machines), tuple(workloads or ()))


def gpu_job(tasks: int, gpus: int, *types: str, name: str = "train") -> JobRequest:
    """Returns a job whose tasks need only GPUs, by default of type a100."""
    return JobRequest(name, tasks, gpus, types or ("a100",), 0, 0)


def request(*jobs: JobRequest, rank: int = 1, may_not_evict: frozenset[str] = frozenset()) -> PlacementRequest:
    """Returns a request of the workload `new`."""
    return PlacementRequest("new", rank, jobs, may_not_evict)


def plan_of(answer: Bid) -> Plan:
    """Returns the plan of a bid, and fails if the bid has none."""
    assert answer.plan is not None, [str(reason) for reason in answer.reasons]
    return answer.plan


# Each list is one draw: few draws make examples fast, and a failure shrinks to the first elements.
_SHAPES = [
    (gpus, types, cpus_milli, gib)
    for gpus, types in [
        (1, ("a100",)),
        (2, ("a100", "h100")),
        (4, ("h100", "a100")),
        (8, ("a100", "h100")),
        (1, ("h100", "a100")),
        (0, ()),
    ]
    for cpus_milli in (1500, 4000, 0, 8000)
    for gib in (0, 1, 4, 7)
    if gpus or cpus_milli or gib
]
_MACHINES = [
    (cluster, rack, gpu_type, gpus, cpus_milli, gib)
    for cluster in ("c1", "c2")
    for rack in ("r1", "r2", "r3")
    for gpu_type, gpus in (("a100", 8), ("a100", 4), ("h100", 8), (None, 0))
    for cpus_milli in (16_000, 33_000)
    for gib in (24, 40)
]
_LIVES = [
    (rank, started_at_s, checkpoint_at_s)
    for rank in (14, 10, 8, 7, 4, 2, 1)
    for started_at_s in (0.0, 100.0, 200.5)
    for checkpoint_at_s in (None, 0.0, 400.25, 900.0, 1000.5)
]
_KINDS = (USUAL, USUAL, ("spot",), ("on_demand", "spot", "reserved"), ("voluntary", "reserved"))
"""Lists of capacity kinds that a gang may accept."""
_MOVES = (
    (), (), (),
    *(tuple(MoveCost(f"here/c{n}", away, us) for n, (away, us) in enumerate(two, 1)) for two in (
        ((False, 5), (True, 3)), ((False, 7), (False, 4)), ((True, 9), (False, 9)), ((False, 2),),
    )),
)  # fmt: skip
"""What a move to clusters `c1` and `c2` costs; mostly, the job does not move."""
_TERMS = [
    (capacity, {"a100": a100, "h100": 2.5}, core, departures_per_h)
    for capacity in ("reserved", "spot", "on_demand", "voluntary")
    for a100 in (0.0, 1.1, 2.5)
    for core in (0.0, 0.033)
    for departures_per_h in ((0.0, 0.25, 0.5) if capacity == "voluntary" else (0.0,))
]
"""Terms of a cluster: its capacity kind, the prices of GPUs by type, the price of a core, and departures per hour."""


def on_terms(machine: MachineState, terms: Mapping[str, tuple[str, Mapping[str, float], float, float]]) -> MachineState:
    """Returns a machine with the terms of its cluster."""
    capacity, gpus, core, departures_per_h = terms[machine.cluster]
    price = gpus[machine.gpu_type] if machine.gpu_type is not None else 0.0
    own = replace(machine, capacity=capacity, gpu_usd_per_h=price, core_usd_per_h=core)
    return replace(own, departures_per_h=departures_per_h)


def in_pool(machine: MachineState, pool: str) -> MachineState:
    """Returns a machine of the region `here` in a pool that only some tenants may use."""
    return replace(machine, pool=pool, capacity=pooled(f"here/{pool}", machine.capacity))


_SPREADS = (
    None, None,
    *(SpreadRule("group", level, required, beside)
      for level in SpreadLevel for required in (False, False, True) for beside in (None, "w0")),
)  # fmt: skip
_SHARES = [(machine, share, with_gpus) for machine in range(9) for share in (1, 2, 4) for with_gpus in (1, 1, 1, 0)]


_LEVELS = tuple(SpreadLevel)
_TOPOLOGIES = [
    (None, None, 1, SpreadLevel.MACHINE),
    *((level, None, size, at) for level in (None, *_LEVELS) for size in (1, 2) for at in _LEVELS[:2]),
    *((None, level, size, at) for level in _LEVELS for size in (1, 2) for at in _LEVELS[:2]),
]
"""Required level, preferred level, size of slices and their level."""


def with_topology(
    job: JobRequest, topology: tuple[SpreadLevel | None, SpreadLevel | None, int, SpreadLevel]
) -> JobRequest:
    """Returns the job with a topology, and with an even number of tasks if it has slices of two."""
    required, preferred, size, level = topology
    if job.span_clusters and required is not SpreadLevel.ZONE:
        required = None
    return replace(job, tasks=job.tasks * size, topology=TopologyRule(required, preferred, size, level))


@st.composite
def requests(draw: st.DrawFn) -> PlacementRequest:
    """Draws a workload of one to three jobs.

    It may be a former victim of `w0` or `w1`, and may displace `w1` to `w3`.
    """
    gang = []
    for index in range(draw(st.sampled_from((1, 2, 3)))):
        gpus, types, cpus_milli, gib = draw(st.sampled_from(_SHAPES))
        gang.append(JobRequest(f"job{index}", draw(st.integers(1, 5)), gpus, types, cpus_milli, gib * GIB))
    if draw(st.sampled_from((False, False, True))):
        gang = [replace(job, span_clusters=True) for job in gang]
    kinds = with_pools(draw(st.sampled_from(_KINDS)), draw(st.sampled_from(((), (), ("here/p",)))))
    gang = [replace(job, capacity=kinds) for job in gang]
    gang = [with_topology(job, draw(st.sampled_from(_TOPOLOGIES))) for job in gang]
    if len(gang) == 1 and gang[0].topology.slice_tasks == 1:
        gang = [replace(gang[0], most_tasks=draw(st.sampled_from((0, 0, 2, 6, 20))))]
    moves = draw(st.sampled_from(_MOVES))
    gang = [replace(job, moves=moves if index else moves[:2]) for index, job in enumerate(gang)]
    immune = draw(st.sampled_from(((), (), (), ("w0",), ("w0", "w1"))))
    displaces = draw(st.sampled_from(((), (), ("w2",), ("w1", "w2", "w3"))))
    rank = draw(st.sampled_from((1, 2, 3, 5, 8, 11, 14)))
    avoids = draw(st.sampled_from(((), (), (), ("m0",), ("m1", "m2"), ("gone",))))
    shuns = draw(st.sampled_from(((), (), ("m0",), ("m0", "m1", "m2"), ("m3", "gone"))))
    failed = draw(st.sampled_from(((), (), ("m0",), ("m1", "m2"))))
    untried = draw(st.sampled_from(((), (), ("m3",), ("m3", "m4", "gone"))))
    return PlacementRequest(
        "new", rank, tuple(gang), frozenset(immune), frozenset(displaces), frozenset(avoids), shuns=frozenset(shuns),
        failed=frozenset(failed), untried=frozenset(untried),
        too_open=frozenset(avoids[: draw(st.integers(0, len(avoids)))]), spread=draw(st.sampled_from(_SPREADS)),
        tenant=draw(st.sampled_from(("", "t", "t"))),
    )  # fmt: skip


@st.composite
def regions(draw: st.DrawFn) -> RegionSnapshot:
    """Draws a region of a few machines that are mostly in use.

    Times and sizes come from a few values, so that ties are common. Free and held resources never exceed a machine's
    total; some resources may be neither (promised). A machine may be missing from the list (cordoned) although
    workloads hold resources there.
    """
    made = draw(st.lists(st.sampled_from(_MACHINES), min_size=2, max_size=9))
    left = [[gpus, cpus_milli, gib * GIB] for _, _, _, gpus, cpus_milli, gib in made]
    workloads = []
    for index in range(draw(st.integers(0, 9))):
        rank, started_at_s, checkpoint_at_s = draw(st.sampled_from(_LIVES))
        holdings = []
        for wanted, share, with_gpus in draw(st.lists(st.sampled_from(_SHARES), min_size=1, max_size=3)):
            place = left[wanted % len(made)]
            gpus, cpus_milli, memory_bytes = (-(-amount // share) for amount in place)
            holdings.append(Holding(f"m{wanted % len(made)}", gpus * with_gpus, cpus_milli, memory_bytes))
            left[wanted % len(made)] = [place[0] - gpus * with_gpus, place[1] - cpus_milli, place[2] - memory_bytes]
        evictable = draw(st.integers(0, 7)) < 7
        lost_s = draw(st.sampled_from((None, None, None, 0.0, 60.0)))
        checkpoint_at_s = None if lost_s is not None else checkpoint_at_s
        workloads.append(
            RunningWorkload(
                f"w{index}", rank, started_at_s, tuple(holdings), checkpoint_at_s, evictable, lost_s=lost_s,
                group=draw(st.sampled_from((None, "group", "group", "other"))),
                tenant=draw(st.sampled_from(("", "t", "t", "u"))),
            )
        )  # fmt: skip
    promised, cordoned = draw(st.sampled_from((0, 0, 0, 1))), draw(st.sampled_from((None, None, None, 0)))
    terms = {cluster: draw(st.sampled_from(_TERMS)) for cluster in ("c1", "c2")}
    zones = draw(st.sampled_from(({"c1": "", "c2": ""}, {"c1": "z", "c2": "z"}, {"c1": "y", "c2": "z"})))
    machines = tuple(
        MachineState(
            f"m{index}",
            cluster,
            rack,
            gpu_type,
            gpus,
            max(0, left[index][0] - promised),
            left[index][1],
            left[index][2],
            cpus_milli,
            gib * GIB,
        )
        for index, (cluster, rack, gpu_type, gpus, cpus_milli, gib) in enumerate(made)
        if index != cordoned
    )
    machines = tuple(replace(on_terms(m, terms), zone=zones[m.cluster]) for m in machines)
    inside = draw(st.sampled_from(((), (), ("m0", "m2"), ("m1", "m2", "m3"))))
    machines = tuple(in_pool(m, "p") if m.id in inside else m for m in machines)
    return RegionSnapshot("here", 1000.0, machines, tuple(workloads))


def crowded(seed: int) -> tuple[RegionSnapshot, PlacementRequest]:
    """Returns a region full of small workloads, many on several machines, and a request that must evict a few of them.

    Everything is drawn from one seed: larger and faster than `regions`, but a failure does not shrink.
    """
    rng = Random(seed)
    machines, slots = [], []
    for index in range(rng.randint(3, 14)):
        gpu_type, gpus = rng.choice((("a100", 8), ("a100", 8), ("h100", 8), ("a100", 4), (None, 0)))
        gib = rng.choice((32, 64))
        made = MachineState(
            f"m{index:02}",
            rng.choice(("c1", "c1", "c2")),
            rng.choice(("r1", "r2")),
            gpu_type,
            gpus,
            rng.choice((0, 0, 0, 1)) if gpus else 0,
            rng.choice((0, 1000)),
            rng.choice((0, GIB)),
            32_000,
            gib * GIB,
        )
        machines.append(made)
        pieces = rng.choice((1, 2, 3, 4))
        gpus, cpus_milli = gpus - made.free_gpus, 32_000 - made.free_cpus_milli
        memory_bytes = gib * GIB - made.free_memory_bytes
        for _ in range(pieces):
            part = rng.choice((1, 2))
            slots.append(Holding(made.id, gpus // pieces, cpus_milli // pieces // part, memory_bytes // pieces))
    rng.shuffle(slots)
    workloads: list[RunningWorkload] = []
    while slots:
        count = rng.choice((1, 1, 2, 3))
        held, slots = slots[:count], slots[count:]
        workloads.append(
            RunningWorkload(
                f"w{len(workloads):02}",
                rng.choice((8, 8, 7, 6, 4)),
                rng.choice((0.0, 100.0, 250.5)),
                tuple(held),
                rng.choice((None, 0.0, 400.25, 900.0)),
                rng.random() < 0.95,
            )
        )
    gang = []
    for index in range(rng.choice((1, 2, 2, 3))):
        gpus = rng.choice((1, 2, 4, 8, 0))
        types = tuple(rng.sample(("a100", "h100"), rng.choice((1, 2)))) if gpus else ()
        cpus_milli = rng.choice((1000, 4000)) if not gpus else rng.choice((0, 1000))
        gang.append(JobRequest(f"job{index}", rng.randint(1, 6), gpus, types, cpus_milli, rng.choice((0, 2)) * GIB))
    spanning = Random(seed + 1).choice((0, 0, 1, 3))
    gang = [replace(job, span_clusters=index < spanning) for index, job in enumerate(gang)]
    places = Random(seed + 7)
    gang = [
        with_topology(job, places.choice(_TOPOLOGIES if places.random() < 0.5 else _TOPOLOGIES[:1])) for job in gang
    ]
    other = Random(seed + 3)
    terms, kinds = {cluster: other.choice(_TERMS) for cluster in ("c1", "c2")}, other.choice(_KINDS)
    gang = [replace(job, capacity=kinds) for job in gang]
    machines = [on_terms(m, terms) for m in machines]
    spread = Random(seed + 5)
    zones = {cluster: spread.choice(("", "z", "y")) for cluster in ("c1", "c2")}
    machines = [replace(m, zone=zones[m.cluster]) for m in machines]
    pools = Random(seed + 7)
    machines = [in_pool(m, "p") if seed % 2 and pools.random() < 0.4 else m for m in machines]
    if pools.random() < 0.5:
        gang = [replace(job, capacity=with_pools(job.capacity, ["here/p"])) for job in gang]
    workloads = [replace(w, group="group" if spread.random() < 0.2 else None) for w in workloads]
    tenants = Random(seed + 6)
    workloads = [replace(w, tenant=tenants.choice(("", "t", "u"))) for w in workloads]
    snapshot = RegionSnapshot("here", 1000.0, tuple(machines), tuple(workloads))
    rank, chance = rng.choice((1, 3, 5)), Random(seed + 2)
    displaces = [w.id for w in workloads if chance.random() < 0.3] if chance.random() < 0.5 else []
    left_out = Random(seed + 4)
    avoids = left_out.sample([m.id for m in machines], left_out.choice((0, 0, 0, 1, 2)))
    shuns = left_out.sample([m.id for m in machines], left_out.choice((0, 0, 1, 3, len(machines))))
    doubted = left_out.sample([m.id for m in machines], left_out.choice((0, 0, 1, 3, len(machines))))
    return snapshot, PlacementRequest(
        "new", rank, tuple(gang), displaces=frozenset(displaces), avoids=frozenset(avoids), shuns=frozenset(shuns),
        failed=frozenset(doubted[::2]), untried=frozenset(doubted[1::2]),
        too_open=frozenset(avoids[::2]), spread=spread.choice(_SPREADS), tenant=tenants.choice(("", "t")),
    )  # fmt: skip


def opened_auction(fleet: list[RegionSnapshot], options: Options) -> Auction:
    """Returns an auction over the regions, at the beginning of a pass."""
    auction = Auction([RegionColumns.of(snapshot) for snapshot in fleet], options)
    auction.open(fleet[0].now_s)
    return auction
