"""The input of a simulation: machines, when they are lent, jobs, links, and the true hazards.

All times are seconds since the start of the scenario; `start_s` is the start on the wall clock, for the time of day.
Everything here is the same for all systems that are compared.
"""

from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from reclaim.arrays import Bools, Floats, Ints

STEP_S = 60.0
"""The bandwidth of a link is constant for this time."""
EPOCH_S = 600.0
"""The true hazard is constant for this time, and decisions of P1 are made once in it unless a system says otherwise."""
DAY_S, HOUR_S = 86_400.0, 3600.0
AT_THE_CORE = -2
"""The place of a store that is not in a building: at the core of the campus."""


@dataclass(frozen=True)
class LentMachines:
    """The machines, one element for each."""

    names: tuple[str, ...]
    building: Ints
    gpus: Ints
    memory_bytes: Floats
    """The memory of one GPU."""
    is_controlled: Bools
    """Whether an agent limits the machine's traffic. The others take part, but send without limits (section X)."""

    def __len__(self) -> int:
        return len(self.names)


@dataclass(frozen=True)
class Lending:
    """The intervals in which machines are lent, sorted by their start. Intervals of one machine do not overlap."""

    node: Ints
    from_s: Floats
    to_s: Floats
    """When the machine departs."""
    notice_s: Floats
    """The notice of the departure; 0: an emergency."""
    departs: Bools
    """Whether the interval ends with a departure; False: it lasts until the end of the scenario."""

    def __len__(self) -> int:
        return len(self.node)


@dataclass(frozen=True)
class SubmittedJobs:
    """The jobs, sorted by the time of submission. A job runs on GPUs of one machine."""

    submit_s: Floats
    gpus: Ints
    work_s: Floats
    """The time of computation, without interruptions."""
    checkpoint_bytes: Floats
    memory_bytes: Floats
    """What the job needs of each GPU."""

    def __len__(self) -> int:
        return len(self.submit_s)


@dataclass(frozen=True)
class Traffic:
    """How links are shared."""

    research_share: float = 0.3
    """The load of research traffic on each link, as a share of the link's bandwidth at that time."""
    connections: int = 4
    """TCP connections of one transfer. Without shaping, a link is shared fairly between connections."""
    overhead_share: float = 0.06
    """Bytes of headers for each byte of payload."""
    write_bytes_s: float = 1.1e9
    """W, the speed of a local write. No transfer is faster."""


@dataclass(frozen=True)
class LendingScenario:
    """The input of a run: machines, when they are lent, jobs, links and the true hazards."""

    name: str
    seed: int
    start_s: float
    length_s: float
    measured_from_s: float
    """Departures before are for calibration and are not counted."""
    buildings: tuple[str, ...]
    machines: LentMachines
    lending: Lending
    work: SubmittedJobs
    links_bytes_s: Floats
    """The bandwidth of links (rows) in each step of `STEP_S`: the access links of machines, then the switch of each
    building, the link of each building towards the core, and the link of each building from the core.

    Machine m has the row m modulo the number of rows of access links, in both directions."""
    emergency_per_h: Floats
    """The true hazard of each machine (rows) in each epoch of `EPOCH_S`, of departures without notice..."""
    notice_per_h: Floats
    """...and with notice."""
    restart_s: float = 30.0
    """T_r."""
    traffic: Traffic = field(default_factory=Traffic)

    @cached_property
    def epochs(self) -> int:
        """The number of epochs."""
        return int(self.emergency_per_h.shape[1])

    def step(self, at_s: float) -> int:
        """Returns the number of the bandwidth step that contains a time."""
        return min(int(at_s // STEP_S), int(self.links_bytes_s.shape[1]) - 1)

    def epoch(self, at_s: float) -> int:
        """Returns the number of the epoch that contains a time."""
        return min(int(at_s // EPOCH_S), self.epochs - 1)

    @cached_property
    def row_of(self) -> Ints:
        """The row of `links_bytes_s` of each link.

        Links are numbered: from each machine, to each machine, the switch of each building, from each building to the
        core, and from the core to each building.
        """
        shared = 3 * len(self.buildings)
        rows = len(self.links_bytes_s) - shared
        access = np.arange(len(self.machines)) % rows
        return np.concatenate((access, access, rows + np.arange(shared)))

    def between(self, source: int, target: int) -> tuple[int, ...]:
        """Returns the links from a building or `AT_THE_CORE` to a building or `AT_THE_CORE`."""
        count, first = len(self.buildings), 2 * len(self.machines)
        if source == target:
            return (first + source,) if source != AT_THE_CORE else ()
        up = (first + count + source,) if source != AT_THE_CORE else ()
        return (*up, first + 2 * count + target) if target != AT_THE_CORE else up

    def upload(self, machine: int, store: int) -> tuple[int, ...]:
        """Returns the links from a machine to the store of a building, or to the store `AT_THE_CORE`."""
        return (machine, *self.between(int(self.machines.building[machine]), store))

    def download(self, store: int, machine: int) -> tuple[int, ...]:
        """Returns the links from the store of a building, or from the store `AT_THE_CORE`, to a machine."""
        return (*self.between(store, int(self.machines.building[machine])), len(self.machines) + machine)

    def move(self, source: int, target: int) -> tuple[int, ...]:
        """Returns the links from a machine to a machine."""
        building = self.machines.building
        shared = self.between(int(building[source]), int(building[target]))
        return (source, *shared, len(self.machines) + target)

    @cached_property
    def lent_gpu_s(self) -> float:
        """The GPU seconds that are lent after `measured_from_s`."""
        held_s = np.clip(self.lending.to_s - np.maximum(self.lending.from_s, self.measured_from_s), 0, None)
        return float(held_s @ self.machines.gpus[self.lending.node])

    @cached_property
    def is_measured(self) -> Bools:
        """For each interval of lending, whether its departure is counted."""
        return self.lending.departs & (self.lending.to_s >= self.measured_from_s)

    def correlation(self) -> float:
        """Returns the correlation of the mean hazard of emergencies and a link's bandwidth over epochs.

        It is the mean over all links; nan if one of them is constant.
        """
        per_epoch = round(EPOCH_S / STEP_S)
        epochs = self.links_bytes_s.shape[1] // per_epoch
        means = self.links_bytes_s[:, : epochs * per_epoch].reshape(-1, epochs, per_epoch).mean(2)
        hazard = self.emergency_per_h.mean(0)[:epochs]
        if not (hazard.std() > 0 and (means.std(1) > 0).all()):
            return float("nan")
        return float(np.mean([np.corrcoef(hazard, one)[0, 1] for one in means]))
