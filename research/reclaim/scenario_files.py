"""Reads a scenario from a YAML or JSON file; docs/reclaim-experiments.md describes it."""

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, ClassVar

import numpy as np
from pydantic import Field, model_validator

from domain.documents import CountKey, DocumentPart, RuleError, Written
from infra.documents import read_document
from infra.errors import ConfigurationError
from reclaim.arrays import Floats, Ints
from research.reclaim import draws, traces
from research.reclaim.scenario import DAY_S, Lending, LendingScenario, LentMachines, SubmittedJobs, Traffic
from research.reclaim.traces import Interval, ScenarioError

Share = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_MONDAY = datetime(2026, 3, 2, tzinfo=UTC)
_DAY_EXISTS = "The day of start exists"
_ONE_SOURCE = "availability has exactly one of drawn, csv and failure_trace"
_ABOVE_LEAST = "notice_median_s is above notice_least_s"
_BELOW_DAYS = "calibration_days is below days"


def _time(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError as error:
        raise RuleError(_DAY_EXISTS, f"must be a time of a day that exists: {error}") from None


Time = Annotated[
    datetime,
    Written(
        "^[12][0-9]{3}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
        "([T ]([01][0-9]|2[0-3]):[0-5][0-9](:[0-5][0-9]([.][0-9]{1,6})?)?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])?)?$",
        "must be a day or a time in the form of ISO 8601, such as 2026-03-02T08:00:00Z", _time,
    ),
]  # fmt: skip


class Model(DocumentPart):
    """Machines of one kind."""

    count: int = Field(ge=1)
    gpu: str = "gpu"
    gpus: int = Field(ge=1, default=1)
    memory_gb: Positive = 24.0


class Drawn(DocumentPart):
    """Times at which machines are lent, drawn from distributions instead of given as data."""

    departures: int = Field(ge=1, default=847)
    lent_share: Annotated[float, Field(gt=0, lt=1)] = 0.6
    machine_sigma: NotNegative = 0.8
    building_sigma: NotNegative = 0.3


class FailureTrace(DocumentPart):
    """Times of lending from a folder with tables of the Failure Trace Archive."""

    folder: Path | None = None
    """None: the folder of the command's option `--data`."""
    from_day: NotNegative = 0.0
    sites: tuple[str, ...] = ()
    """The sites that become buildings; empty: those with the most machines."""


class Availability(DocumentPart):
    """When machines are lent and taken back, from exactly one of the three sources."""

    rules: ClassVar = (_ONE_SOURCE,)
    drawn: Drawn | None = None
    csv: Path | None = None
    failure_trace: FailureTrace | None = None

    @model_validator(mode="after")
    def _one(self) -> "Availability":
        given = [name for name in ("drawn", "csv", "failure_trace") if getattr(self, name) is not None]
        if len(given) != 1:
            has = ", ".join(given) or "nothing"
            raise RuleError(_ONE_SOURCE, f"has {has}: give exactly one of drawn, csv and failure_trace")
        return self


class Departures(DocumentPart):
    """Notices that are drawn, where the availability does not give them."""

    rules: ClassVar = (_ABOVE_LEAST,)
    emergency_share: Share = 0.42
    notice_least_s: NotNegative = 10.0
    notice_median_s: Positive = 600.0
    notice_sigma: NotNegative = 1.0

    @model_validator(mode="after")
    def _ordered(self) -> "Departures":
        if self.notice_median_s <= self.notice_least_s:
            message = (
                f"notice_median_s: {self.notice_median_s:g}: must be above {self.notice_least_s:g}, notice_least_s"
            )
            raise RuleError(_ABOVE_LEAST, message)
        return self


class Peaks(DocumentPart):
    """The hours in which owners come, and people use the network."""

    hours: tuple[tuple[NotNegative, NotNegative], ...] = ((11.5, 13.0), (17.5, 20.0))
    factor: Positive = 6.0


class JobMix(DocumentPart):
    """Jobs that are drawn, or `csv`."""

    csv: Path | None = None
    count: int = Field(ge=1, default=312)
    gpu_hours: Positive = 4890.0
    gpus: dict[CountKey, Positive] = {1: 0.8, 2: 0.12, 4: 0.08}
    duration_sigma: NotNegative = 1.0
    checkpoint_least_bytes: Positive = 120e6
    checkpoint_median_bytes: Positive = 3.2e9
    checkpoint_most_bytes: Positive = 48e9
    checkpoint_sigma: NotNegative | None = None


class NetworkDocument(DocumentPart):
    """Bandwidth and its sharing."""

    local_mbit_s: Positive = 820.0
    building_mbit_s: Positive = 6000.0
    core_mbit_s: Positive = 240.0
    swing: Annotated[float, Field(ge=0, lt=1)] = 0.6
    correlation: Annotated[float, Field(ge=-1, le=0)] = -0.43
    research_share: Share = 0.3
    connections: int = Field(ge=1, default=4)
    overhead_share: NotNegative = 0.06
    write_mb_s: Positive = 1100.0


class ScenarioDocument(DocumentPart):
    """A scenario file."""

    rules: ClassVar = (_BELOW_DAYS, _DAY_EXISTS)
    version: int = Field(ge=1, le=1)
    name: str
    seed: int = Field(ge=0, default=1)
    start: Time = _MONDAY
    days: Annotated[float, Field(gt=0, le=3660)] = 60.0
    calibration_days: NotNegative = 14.0
    buildings: int = Field(ge=1, le=1000, default=4)
    machines: tuple[Model, ...] = (
        Model(count=20, gpu="RTX 3090"),
        Model(count=15, gpu="RTX 4090"),
        Model(count=8, gpu="A100", gpus=4, memory_gb=80),
        Model(count=10, gpu="A6000", gpus=2, memory_gb=48),
    )
    availability: Availability = Availability(drawn=Drawn())
    departures: Departures = Departures()
    peaks: Peaks = Peaks()
    jobs: JobMix = JobMix()
    network: NetworkDocument = NetworkDocument()
    participation: Share = 1.0
    hindsight_days: Positive = 1.0
    restart_s: NotNegative = 30.0

    @model_validator(mode="after")
    def _measured(self) -> "ScenarioDocument":
        if self.calibration_days >= self.days:
            message = f"calibration_days: {self.calibration_days:g}: must be below {self.days:g}, days"
            raise RuleError(_BELOW_DAYS, message)
        return self


def read(path: Path) -> ScenarioDocument:
    """Returns the document of a file.

    Raises:
        ScenarioError: the file cannot be read or is not valid; the message names the file and the field.
    """
    try:
        return read_document(ScenarioDocument, path, "scenario file")
    except ConfigurationError as error:
        raise ScenarioError(str(error)) from None


def build(
    document: ScenarioDocument, folder: Path, data: Path | None = None, seed: int | None = None
) -> LendingScenario:
    """Returns the scenario of a document.

    Args:
        document: the document.
        folder: relative paths in the document start here.
        data: the folder of a failure trace for which the document names none.
        seed: replaces the document's.

    Raises:
        ScenarioError: a file is missing or not valid.
    """
    seed = document.seed if seed is None else seed
    # A stream for each part: a change of one part leaves the draws of the others.
    streams = [np.random.default_rng([seed, part]) for part in range(6)]
    start = document.start if document.start.tzinfo else document.start.replace(tzinfo=UTC)
    start_s, length_s = start.timestamp(), document.days * DAY_S
    day = draws.Day(document.peaks.hours, document.peaks.factor)
    models = [model for model in document.machines for _ in range(model.count)]
    given: list[Interval] | None = None
    if document.availability.csv is not None:
        given = traces.read_csv(folder / document.availability.csv, start_s, length_s)
    elif document.availability.failure_trace is not None:
        which = document.availability.failure_trace
        where = folder / which.folder if which.folder is not None else data
        if where is None:
            raise ScenarioError("availability.failure_trace.folder: not given: name it, or give --data FOLDER")
        given, start_s = traces.read_failure_trace(
            where, which.sites, document.buildings, len(models), which.from_day, length_s, streams[0]
        )
    if given is None:
        building = np.arange(len(models)) % document.buildings
        building_names = tuple(f"building-{n + 1}" for n in range(document.buildings))
        names = tuple(f"node-{n + 1}" for n in range(len(models)))
        shuffled = [models[int(n)] for n in streams[1].permutation(len(models))]
    else:
        names, building, building_names = traces.places(given, document.buildings)
        picked = streams[1].permutation(len(names)) % len(models)
        shuffled = [models[int(n)] for n in picked]
    machines = _machines(names, building, shuffled, given, document.participation, streams[1])
    owner = draws.Notices(
        document.departures.emergency_share,
        document.departures.notice_least_s,
        document.departures.notice_median_s,
        document.departures.notice_sigma,
    )
    share = document.departures.emergency_share
    if given is None:
        settings = document.availability.drawn or Drawn()
        lending, hazard = draws.comings(
            streams[0], building, length_s, start_s, draws.Owners(**settings.model_dump()), day
        )
        lending = replace(lending, notice_s=_notices(lending, owner, streams[2], None))
        emergency, notice = hazard * share, hazard * (1 - share)
    else:
        number = {name: n for n, name in enumerate(names)}
        ordered = sorted(given, key=lambda one: (one.from_s, one.to_s, number[one.node]))
        lending = draws.lending_of([(one.from_s, one.to_s, number[one.node]) for one in ordered], length_s)
        wanted = {(one.from_s, number[one.node]): one.notice_s for one in ordered}
        known = np.array(
            [wanted[float(at), int(node)] for at, node in zip(lending.from_s, lending.node, strict=True)], np.float64
        )
        lending = replace(lending, notice_s=_notices(lending, owner, streams[2], known))
        emergency, notice = draws.hindsight(lending, len(names), building, length_s, document.hindsight_days)
    network = document.network
    links = draws.bandwidth(
        streams[3], len(names), len(building_names), length_s, start_s,
        draws.Swings(
            network.local_mbit_s * 125e3, network.building_mbit_s * 125e3, network.core_mbit_s * 125e3, network.swing,
            network.correlation,
        ),
        day, emergency,
    )  # fmt: skip
    traffic = Traffic(network.research_share, network.connections, network.overhead_share, network.write_mb_s * 1e6)
    return LendingScenario(
        document.name, seed, start_s, length_s, document.calibration_days * DAY_S, building_names, machines, lending,
        _work(document.jobs, machines, length_s, folder, streams[4]), links, emergency, notice, document.restart_s,
        traffic,
    )  # fmt: skip


def _machines(
    names: tuple[str, ...],
    building: Ints,
    models: list[Model],
    given: list[Interval] | None,
    participation: float,
    rng: np.random.Generator,
) -> LentMachines:
    gpus = np.array([model.gpus for model in models], np.int64)
    memory = np.array([model.memory_gb * 1e9 for model in models], np.float64)
    for one in given or []:
        if one.gpus is not None:
            gpus[names.index(one.node)] = one.gpus
        if one.memory_bytes is not None:
            memory[names.index(one.node)] = one.memory_bytes
    controlled = np.zeros(len(names), np.bool_)
    controlled[rng.permutation(len(names))[: round(participation * len(names))]] = True
    return LentMachines(names, np.asarray(building, np.int64), gpus, memory, controlled)


def _notices(lending: Lending, owner: draws.Notices, rng: np.random.Generator, known: Floats | None) -> Floats:
    """Returns the notice of each interval's departure; those that are not known are drawn."""
    notice_s = np.zeros(len(lending)) if known is None else known.copy()
    missing = lending.departs & (np.isnan(notice_s) if known is not None else True)
    notice_s[missing] = owner.draw(rng, int(missing.sum()))
    # A notice cannot come before the machine was lent.
    return np.where(lending.departs, np.minimum(notice_s, lending.to_s - lending.from_s), 0.0)


def _work(
    mix: JobMix, machines: LentMachines, length_s: float, folder: Path, rng: np.random.Generator
) -> SubmittedJobs:
    if mix.csv is None:
        return draws.work(
            rng,
            draws.Jobs(
                mix.count, mix.gpu_hours, tuple(mix.gpus.items()), mix.duration_sigma, mix.checkpoint_least_bytes,
                mix.checkpoint_median_bytes, mix.checkpoint_most_bytes, mix.checkpoint_sigma,
            ),
            machines,
            length_s,
        )  # fmt: skip
    path = folder / mix.csv
    rows = traces.table(path, ("submit_s", "gpus", "work_s", "checkpoint_bytes"))
    found = []
    for line, row in rows:
        values = [
            traces.number(path, line, name, row.get(name) or str(otherwise), least)
            for name, otherwise, least in (
                ("submit_s", "", 0.0), ("gpus", "", 1.0), ("work_s", "", 0.0), ("checkpoint_bytes", "", 0.0),
                ("memory_bytes", 8e9, 0.0),
            )
        ]  # fmt: skip
        fits = (machines.gpus >= values[1]) & (machines.memory_bytes >= values[4])
        if not fits.any():
            raise ScenarioError(
                f"{path}, line {line}: gpus: {values[1]:g} with {values[4]:g} bytes of memory each: no machine of the"
                " scenario has as many"
            )
        found.append(values)
    columns = np.array(sorted(found), np.float64).reshape(-1, 5).T
    return SubmittedJobs(columns[0], columns[1].astype(np.int64), columns[2], columns[3], columns[4])
