"""Draws the parts that a scenario file does not give: lending, bandwidth, jobs. Each has its own random stream."""

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from reclaim.arrays import Bools, Floats, Ints
from research.reclaim.scenario import DAY_S, EPOCH_S, HOUR_S, STEP_S, Lending, LentMachines, SubmittedJobs

_GRID_S = 60.0
_SWING_S = 180.0
"""The time constant of the swings. Within ten minutes a link passes through most of its range."""
_TRIES = 60
_MOST_ACCESS = 64
"""Access links that are drawn, each with its own swings. Machines beyond share them, to limit the memory."""


@dataclass(frozen=True)
class Day:
    """The hazard over the day: `factor` within the peaks, 1 at other times."""

    peaks_h: tuple[tuple[float, float], ...] = ((11.5, 13.0), (17.5, 20.0))
    factor: float = 6.0

    def at(self, wall_s: Floats) -> Floats:
        """Returns the factor at times on the wall clock."""
        return np.where(self.is_peak(wall_s), self.factor, 1.0)

    def is_peak(self, wall_s: Floats) -> Bools:
        """Returns whether times on the wall clock are in a peak."""
        hour = np.asarray(wall_s) % DAY_S / HOUR_S
        inside = np.zeros(hour.shape, np.bool_)
        for start, end in self.peaks_h:
            inside |= (hour >= start) & (hour < end)
        return inside


@dataclass(frozen=True)
class Owners:
    """How owners lend and take back their machines."""

    departures: int = 847
    lent_share: float = 0.6
    """The share of the time in which a machine is lent."""
    machine_sigma: float = 0.8
    """The spread of the hazard between machines (of its logarithm)..."""
    building_sigma: float = 0.3
    """...and between buildings."""


@dataclass(frozen=True)
class Notices:
    """Which departures have a notice, and how long it is: `least_s` plus a log-normal time."""

    emergency_share: float = 0.42
    least_s: float = 10.0
    median_s: float = 600.0
    sigma: float = 1.0

    def draw(self, rng: np.random.Generator, count: int) -> Floats:
        """Returns the notice of each departure; 0 for the share of emergencies, rounded to a whole number of them."""
        notice_s = self.least_s + np.exp(rng.normal(np.log(max(self.median_s - self.least_s, 1e-9)), self.sigma, count))
        notice_s[rng.permutation(count)[: round(count * self.emergency_share)]] = 0.0
        return notice_s


@dataclass(frozen=True)
class Swings:
    """How the bandwidth of links varies over time."""

    local_bytes_s: float = 820e6 / 8
    """The access link of a machine."""
    building_bytes_s: float = 6e9 / 8
    """The switch of a building, which its machines share."""
    core_bytes_s: float = 240e6 / 8
    """A building's link to the core, and from it."""
    swing: float = 0.6
    """The largest deviation from the mean of the hour."""
    correlation: float = -0.43
    """The correlation of the hazard and the bandwidth of a link over epochs."""


def comings(
    rng: np.random.Generator, building: Ints, length_s: float, start_s: float, owners: Owners, day: Day
) -> tuple[Lending, Floats]:
    """Draws intervals in which machines are lent, without notices; also returns the true hazards (per hour) by epoch.

    The rate is scaled until the intervals have the wanted number of departures, with the same random numbers.
    """
    count = len(building)
    level = np.exp(rng.normal(0, owners.machine_sigma, count))
    level *= np.exp(rng.normal(0, owners.building_sigma, building.max() + 1))[building]
    grid_s = np.arange(0, length_s + _GRID_S, _GRID_S)
    summed = np.concatenate(([0.0], np.cumsum(day.at(start_s + grid_s[:-1])))) * (_GRID_S / HOUR_S)
    mean_lent_s = count * length_s * owners.lent_share / owners.departures
    most = int(8 * owners.departures / count) + 50
    budget = rng.exponential(1.0, (count, most))
    away_s = rng.exponential(mean_lent_s * (1 - owners.lent_share) / max(owners.lent_share, 1e-9), (count, most))
    starts_lent = rng.random(count) < owners.lent_share
    mean_factor = float(summed[-1] / (length_s / HOUR_S))

    def drawn(rate_per_h: float) -> list[tuple[float, float, int]]:
        found = []
        for node in range(count):
            at_s = 0.0 if starts_lent[node] else away_s[node, -1]
            for number in range(most):
                if at_s >= length_s:
                    break
                goal = np.interp(at_s, grid_s, summed) + budget[node, number] / (rate_per_h * level[node])
                until_s = float(np.interp(goal, summed, grid_s)) if goal < summed[-1] else np.inf
                found.append((at_s, until_s, node))
                at_s = until_s + away_s[node, number]
        return found

    rate_per_h = HOUR_S / mean_lent_s / mean_factor / float(level.mean())
    low, high, best = rate_per_h / 20, rate_per_h * 20, (np.inf, rate_per_h)
    for _ in range(_TRIES):
        middle = float(np.sqrt(low * high))
        ended = sum(np.isfinite(until_s) for _, until_s, _ in drawn(middle))
        best = min(best, (abs(ended - owners.departures), middle))
        if ended == owners.departures:
            break
        low, high = (middle, high) if ended < owners.departures else (low, middle)
    hazard = np.outer(best[1] * level, day.at(start_s + np.arange(0, length_s, EPOCH_S)))
    return lending_of(drawn(best[1]), length_s), hazard


def lending_of(intervals: list[tuple[float, float, int]], length_s: float) -> Lending:
    """Returns intervals (from, to, machine) as columns; an end at or after the end of the scenario is no departure."""
    ordered = sorted(intervals)
    from_s = np.array([one[0] for one in ordered], np.float64)
    to_s = np.array([one[1] for one in ordered], np.float64)
    node = np.array([one[2] for one in ordered], np.int64)
    return Lending(node, from_s, np.minimum(to_s, length_s), np.zeros(len(node)), to_s < length_s)


def hindsight(
    lending: Lending, count: int, building: Ints, length_s: float, kernel_days: float = 1.0
) -> tuple[Floats, Floats]:
    """Estimates the hazards of machines from all of their intervals, with a kernel around each time.

    The kernel reaches `kernel_days` to both sides.

    The first is of departures without notice, the second of others. This uses departures before and after each time,
    so only an oracle can have it. A machine's own rate is shrunk towards that of its building.
    """
    epochs = int(np.ceil(length_s / EPOCH_S))
    lent_h, counts = np.zeros((count, epochs)), np.zeros((2, count, epochs))
    edges_s = np.arange(epochs + 1) * EPOCH_S
    for node, from_s, to_s in zip(lending.node, lending.from_s, lending.to_s, strict=True):
        lent_h[node] += np.clip(np.minimum(to_s, edges_s[1:]) - np.maximum(from_s, edges_s[:-1]), 0, None) / HOUR_S
    last = np.minimum((lending.to_s // EPOCH_S).astype(int), epochs - 1)
    for kind, chosen in enumerate((lending.notice_s == 0, lending.notice_s > 0)):
        at = chosen & lending.departs
        np.add.at(counts[kind], (lending.node[at], last[at]), 1)
    kernel = np.hanning(round(2 * kernel_days * DAY_S / EPOCH_S) + 2)[1:-1]
    kernel = kernel / kernel.max()

    def smooth(rows: Floats) -> Floats:
        size = rows.shape[1] + len(kernel) - 1
        found = np.fft.irfft(np.fft.rfft(rows, size) * np.fft.rfft(kernel, size), size)
        first = (len(kernel) - 1) // 2
        return np.asarray(np.maximum(found[:, first : first + rows.shape[1]], 0))

    exposure = smooth(lent_h)
    member = np.zeros((building.max() + 1, count))
    member[building, np.arange(count)] = 1
    hazards = []
    for kind in range(2):
        events = smooth(counts[kind])
        whole = counts[kind].sum() / max(lent_h.sum(), 1e-9)
        near = (member @ events + whole * 24) / (member @ exposure + 24)
        hazards.append((events + near[building] * 24) / (exposure + 24))
    return hazards[0], hazards[1]


def bandwidth(
    rng: np.random.Generator,
    machines: int,
    buildings: int,
    length_s: float,
    start_s: float,
    swings: Swings,
    day: Day,
    hazard_per_h: Floats,
) -> Floats:
    """Returns the bandwidth of each link in each step; the numbering is that of `Scenario.links_bytes_s`.

    People use the network at the times of the peaks. The dip then is as deep as the wanted correlation needs.
    """
    access = min(machines, _MOST_ACCESS)
    steps, links = int(np.ceil(length_s / STEP_S)), access + 3 * buildings
    kept = np.exp(-STEP_S / _SWING_S)
    noise = rng.normal(size=(steps, links))
    state = rng.normal(size=links)
    for step in range(steps):
        state = kept * state + np.sqrt(1 - kept**2) * noise[step]
        noise[step] = state
    # The distribution function of the normal distribution, so that deviations are uniform.
    uniform = np.tanh(0.7978845608 * (noise + 0.044715 * noise**3)).T
    swing = 1 + swings.swing * uniform
    peak = day.is_peak(np.asarray(start_s + np.arange(steps) * STEP_S, np.float64))
    means = (swings.local_bytes_s, swings.building_bytes_s, swings.core_bytes_s)
    mean = np.repeat(means, (access, buildings, 2 * buildings))[:, None]
    per_epoch = round(EPOCH_S / STEP_S)
    epochs = steps // per_epoch
    hazard = hazard_per_h.mean(0)[:epochs]

    def dipped(depth: float) -> Floats:
        shape = 1 - depth * peak
        return np.asarray(swing * (shape / shape.mean()))

    def correlation(depth: float) -> float:
        means = dipped(depth)[:, : epochs * per_epoch].reshape(links, epochs, per_epoch).mean(2)
        return float(np.mean([np.corrcoef(hazard, one)[0, 1] for one in means]))

    low, high = 0.0, 0.9
    if not (peak.any() and hazard.std() > 0 and correlation(high) < swings.correlation):
        return np.asarray(mean * dipped(0.0))
    for _ in range(25):
        middle = (low + high) / 2
        low, high = (low, middle) if correlation(middle) < swings.correlation else (middle, high)
    return np.asarray(mean * dipped(low))


@dataclass(frozen=True)
class Jobs:
    """The mix of jobs."""

    count: int = 312
    gpu_hours: float = 4890.0
    gpus: tuple[tuple[int, float], ...] = ((1, 0.8), (2, 0.12), (4, 0.08))
    """Numbers of GPUs, each with its share of the jobs."""
    duration_sigma: float = 1.0
    least_bytes: float = 120e6
    median_bytes: float = 3.2e9
    most_bytes: float = 48e9
    bytes_sigma: float | None = None
    """The spread of the checkpoints' sizes (of their logarithms). None: the smallest job has `least_bytes`, the largest
    `most_bytes`, with a spread of its own on each side of the median."""
    memory_factor: float = 1.2
    """The memory that a job needs on its GPUs together, relative to its checkpoint..."""
    least_memory_bytes: float = 8e9
    """...but at least this for each GPU."""


def work(rng: np.random.Generator, jobs: Jobs, machines: LentMachines, length_s: float) -> SubmittedJobs:
    """Returns drawn jobs. Each fits on at least one machine; a checkpoint that is too large for all is made smaller."""
    count = jobs.count
    choices, weights = zip(*jobs.gpus, strict=True)
    fitting = [(n, w) for n, w in zip(choices, weights, strict=True) if n <= machines.gpus.max()]
    choices, weights = zip(*fitting, strict=True)
    gpus = rng.choice(np.array(choices), count, p=np.array(weights) / sum(weights)).astype(np.int64)
    gpu_h = np.exp(rng.normal(0, jobs.duration_sigma, count))
    gpu_h *= jobs.gpu_hours / gpu_h.sum()
    # One job for each of `count` equal parts of the distribution, so that the median is exact.
    normal = NormalDist()
    quantiles = np.array([normal.inv_cdf((place + 0.5) / count) for place in rng.permutation(count).tolist()])
    if jobs.bytes_sigma is None:
        most = max(normal.inv_cdf(1 - 0.5 / count), 1e-9)
        below, above = np.log([jobs.median_bytes / jobs.least_bytes, jobs.most_bytes / jobs.median_bytes]) / most
        spread = np.where(quantiles < 0, below, above)
    else:
        spread = np.full(count, jobs.bytes_sigma)
    size = np.clip(jobs.median_bytes * np.exp(spread * quantiles), jobs.least_bytes, jobs.most_bytes)
    room = np.array([machines.memory_bytes[machines.gpus >= n].max() for n in gpus])
    size = np.minimum(size, room * gpus / jobs.memory_factor)
    memory = np.clip(jobs.memory_factor * size / gpus, np.minimum(jobs.least_memory_bytes, room), room)
    submit_s = np.sort(rng.uniform(0, 0.97 * length_s, count))
    return SubmittedJobs(submit_s, gpus, gpu_h * HOUR_S / gpus, size, memory)
