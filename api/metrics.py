"""Prometheus metrics: of the whole installation, read from Postgres, and of the requests to this process."""

import logging
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from sqlalchemy import Engine, select, text
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.orm import Session, defer
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from api.services.metrics import service_metrics, service_totals
from api.streams.hub import Hub
from domain.phases import QUEUED_PHASES, Phase
from infra.db import outbox, published_queue
from infra.db.buckets import bucket_states
from infra.db.costs import ended_totals
from infra.db.lost_work import lost_by
from infra.db.models import Attempt
from infra.db.rounds import loop_states
from infra.db.session import transaction
from infra.db.silent_regions import silent_regions

_log = logging.getLogger(__name__)
_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
OVERDUE_S = 1800
"""A replica whose objects still exist this long after its grace period is counted as kept."""
_KEEP_S = 1.0
"""Scrapes within this time return cached values: the endpoint needs no key, and the queries are expensive."""


class InstallationCollector(Collector):
    """Collects the metrics that are read from Postgres."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._kept: tuple[float, list[Metric]] = (float("-inf"), [])

    def describe(self) -> Iterable[Metric]:
        """Returns nothing, so that registering the collector does not query the database."""
        return []

    def collect(self) -> Iterable[Metric]:
        """Returns all metric families; if Postgres does not respond, only `mizzen_database_up` with value 0."""
        at, families = self._kept
        if time.monotonic() - at < _KEEP_S:
            return families
        is_up = GaugeMetricFamily("mizzen_database_up", "1 if Postgres responds, else 0")
        try:
            families = [*self._read(), is_up]
            is_up.add_metric([], 1)
        except SQLAlchemyError as error:
            _log.warning("metrics: %s", str(error).splitlines()[0])
            families = [is_up]
            is_up.add_metric([], 0)
        self._kept = (time.monotonic(), families)
        return families

    def _read(self) -> Iterator[Metric]:
        with transaction(self._engine) as session:

            def rows(sql: str, **values: object) -> list[tuple[object, ...]]:
                return [tuple(row) for row in session.execute(text(sql), values)]

            phases = {str(phase): 0.0 for phase in Phase}
            for phase, count in rows("select phase, count(*) from workload group by phase"):
                phases[str(phase)] = _number(count)
            workloads = GaugeMetricFamily("mizzen_workloads", "Workloads by phase", labels=["phase"])
            for name, number in phases.items():
                workloads.add_metric([name], number)
            yield workloads
            ((blocked,),) = rows("select count(*) from workload where finished_at is null and blocked is not null")
            queued = sum(phases[phase] for phase in QUEUED_PHASES) - _number(blocked)
            yield GaugeMetricFamily("mizzen_queue_length", "Workloads in the queue", value=queued)
            says = "Workloads that wait for their dependencies"
            yield GaugeMetricFamily("mizzen_blocked_workloads", says, value=_number(blocked))
            slots = GaugeMetricFamily(
                "mizzen_gpu_slots", "GPU slots of machines that are not lost", labels=["region", "gpu_type", "state"]
            )
            for region, gpu_type, *counts in rows(
                "select region, gpu_type, sum(gpus - bit_count(withheld::bit(64))), sum(bit_count(held::bit(64))),"
                " sum(bit_count(promised::bit(64)))"
                " from machine where gpu_type is not null and state <> 'lost' group by region, gpu_type order by 1, 2"
            ):
                for state, count in zip(("total", "held", "promised"), counts, strict=True):
                    slots.add_metric([str(region), str(gpu_type), state], _number(count))
            yield slots
            machines = GaugeMetricFamily("mizzen_machines", "Machines by region and state", labels=["region", "state"])
            for region, kind, count in rows("select region, state, count(*) from machine group by 1, 2 order by 1, 2"):
                machines.add_metric([str(region), str(kind)], _number(count))
            yield machines
            missing = silent_regions(session)
            silent = GaugeMetricFamily(
                "mizzen_region_silent_seconds",
                "Time since a region last bid in time; state silent: nothing is placed there, slow: it bids late",
                labels=["region", "state"],
            )
            buckets = GaugeMetricFamily(
                "mizzen_region_bucket_unavailable_seconds",
                "Time since a region's bucket last responded (nothing is placed there meanwhile); 0: it responds",
                labels=["region"],
            )
            states = bucket_states(session, [str(name) for (name,) in rows("select name from region")])
            for region, now_s in rows("select name, extract(epoch from clock_timestamp()) from region order by 1"):
                for state, is_slow in (("silent", False), ("slow", True)):
                    found = missing.get(str(region))
                    since_s = found.since_s if found is not None and found.slow == is_slow else _number(now_s)
                    silent.add_metric([str(region), state], max(0.0, _number(now_s) - since_s))
                bucket = states.get(str(region))
                failing_since_s = bucket.failing_since_s if bucket is not None else None
                failing_s = 0.0 if failing_since_s is None else max(0.0, _number(now_s) - failing_since_s)
                buckets.add_metric([str(region)], failing_s)
            yield from (silent, buckets)
            unusable = rows("select count(*) from machine where cordon is not null or draining")[0][0]
            yield GaugeMetricFamily("mizzen_machines_cordoned", "Machines cordoned or drained", value=_number(unusable))
            mail = outbox.backlog(session)
            yield GaugeMetricFamily("mizzen_outbox_backlog", "Undelivered outbox messages", value=mail.messages)
            yield GaugeMetricFamily(
                "mizzen_outbox_oldest_seconds", "Age of the oldest undelivered message", value=mail.oldest_s
            )
            copies = GaugeMetricFamily(
                "mizzen_replicas_wrong", "Replicas that failed verification and are not repaired yet", labels=["region"]
            )
            kept = GaugeMetricFamily(
                "mizzen_replicas_kept", "Replicas that are not deleted although their grace is over", labels=["region"]
            )
            for region, wrong, held in rows(
                "select r.name, count(p.wrong_since), count(*) filter (where p.kept_because is not null"
                f" or p.state = 'deleting' and p.delete_at < now() - interval '{OVERDUE_S} s') from region as r"
                " left join replica as p on p.region = r.name group by r.name order by r.name"
            ):
                copies.add_metric([str(region)], _number(wrong))
                kept.add_metric([str(region)], _number(held))
            yield from (copies, kept)
            ended = ended_totals(session)
            preempted = float(sum(preemptions for _, preemptions, _ in ended))
            yield CounterMetricFamily("mizzen_preemptions", "Attempts that were preempted", value=preempted)
            lost = CounterMetricFamily("mizzen_work_lost_seconds", "Work lost by interruptions", labels=["region"])
            for region, _, lost_s in ended:
                lost.add_metric([region], lost_s)
            yield lost
            yield from _loops(session)
            yield from self._checkpoints(session)
            yield from _region_gpus(session)
            auctions = CounterMetricFamily(
                "mizzen_auction", "Counters of scans and auctions since the start of their worker", labels=["what"]
            )
            for what, count in sorted(published_queue.progress(session)[1].items()):
                auctions.add_metric([what], count)
            yield auctions
            yield from service_totals(session)

    @staticmethod
    def _checkpoints(session: Session) -> Iterator[Metric]:
        """Yields checkpoint metrics of running workloads by region; one label per workload would be too many."""
        families = [
            GaugeMetricFamily(f"mizzen_{name}", text_, labels=["region"])
            for name, text_ in (
                ("checkpoint_oldest_seconds", "Longest time since a running workload last saved or started"),
                ("checkpoint_bytes", "Total size of the newest checkpoints of running workloads"),
                ("checkpoint_interval_seconds", "W: time between two saves, mean over running workloads"),
                ("checkpoint_cost_seconds", "C: time that a save blocks the training, mean over running workloads"),
                ("gang_mtbf_seconds", "mu: mean time between interruptions of a gang, mean over running workloads"),
                ("work_at_risk_seconds", "Work that would be lost if all running workloads were interrupted now"),
            )
        ]
        live: dict[str, list[Attempt]] = defaultdict(list)
        running = select(Attempt).where(Attempt.released_at.is_(None), Attempt.started_at.is_not(None))
        # The plans are not loaded, because they can be large.
        for attempt in session.scalars(running.options(defer(Attempt.plan))):
            live[attempt.region].append(attempt)
        now_s = float(session.execute(text("select extract(epoch from clock_timestamp())")).scalar_one())
        for region, attempts in sorted(live.items()):
            since = [a.checkpoint_at or a.started_at for a in attempts]
            cadences = [a.cadence or {} for a in attempts]
            values = (
                max(max(0.0, now_s - at.timestamp()) for at in since if at is not None),
                float(sum(a.checkpoint_bytes or 0 for a in attempts)),
                *(_mean(c.get(name) for c in cadences) for name in ("interval_s", "cost_s", "mtbf_s")),
                sum(lost_by(a, now_s) for a in attempts),
            )
            for family, value in zip(families, values, strict=True):
                if value is not None:
                    family.add_metric([region], value)
        yield from families


def _loops(session: Session) -> Iterator[Metric]:
    failures = GaugeMetricFamily(
        "mizzen_loop_failures", "Consecutive failed rounds of a periodic loop (GET /v1/loops)", labels=["loop"]
    )
    ages = GaugeMetricFamily(
        "mizzen_loop_success_age_seconds", "Time since a round of a periodic loop last succeeded", labels=["loop"]
    )
    found, now_s = loop_states(session)
    for name, loop in found.items():
        failures.add_metric([name], loop.failures)
        if loop.succeeded_at_s is not None:
            ages.add_metric([name], max(0.0, now_s - loop.succeeded_at_s))
    yield from (failures, ages)


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _number(value: object) -> float:
    return float(str(value)) if value is not None else 0.0


_IN_USE = (
    "select a.region, w.tenant, a.workload, u.job, u.task, u.gpus, u.percent, u.used_bytes from attempt as a"
    " join workload as w on w.id = a.workload, jsonb_to_recordset(a.gpu_use)"
    " as u(job text, task int, gpus int, percent int, used_bytes bigint)"
    " where a.released_at is null and a.started_at is not null"
    " and (cast(:tenant as text) is null or w.tenant = :tenant)"
    " order by w.tenant, a.workload, u.job, u.task"
)


def _region_gpus(session: Session) -> Iterator[Metric]:
    """Yields the use of the GPUs of running workloads by region."""
    busy = GaugeMetricFamily("mizzen_gpus_busy", "Number of GPUs that compute for tasks, on average", labels=["region"])
    used = GaugeMetricFamily("mizzen_gpus_used_bytes", "Memory in use on GPUs of running tasks", labels=["region"])
    summed = f"select region, sum(gpus * percent) / 100.0, sum(used_bytes) from ({_IN_USE}) as u group by 1 order by 1"
    for region, count, size_bytes in session.execute(text(summed), {"tenant": None}):
        busy.add_metric([region], _number(count))
        used.add_metric([region], _number(size_bytes))
    yield from (busy, used)


def _task_gpus(session: Session, tenant: str | None) -> Iterator[Metric]:
    """Yields the use of the GPUs of each running task of a tenant, or of all (None)."""
    labels = ["tenant", "workload", "job", "task"]
    percent = GaugeMetricFamily("mizzen_task_gpu_percent", "Time in which its GPUs compute, mean", labels=labels)
    used = GaugeMetricFamily("mizzen_task_gpu_used_bytes", "Memory in use on its GPUs", labels=labels)
    for row in session.execute(text(_IN_USE), {"tenant": tenant}):
        values = [row.tenant, row.workload, row.job, str(row.task)]
        percent.add_metric(values, row.percent)
        used.add_metric(values, row.used_bytes)
    yield from (percent, used)


class ServiceCollector(Collector):
    """Collects the metrics of each service, and of the GPUs of each running task, that the caller may see."""

    def __init__(self, engine: Engine, tenant: str | None) -> None:
        """`tenant`: only this tenant's services; None: all services."""
        self._engine, self._tenant = engine, tenant

    def collect(self) -> Iterable[Metric]:
        """Returns all metric families.

        Raises:
            SQLAlchemyError: Postgres does not respond.
        """
        with transaction(self._engine) as session:
            return [*service_metrics(session, self._tenant), *_task_gpus(session, self._tenant)]


class Served(NamedTuple):
    """The requests to this process since its start."""

    requests: int
    failed: int
    """Number of requests with a 5xx response."""
    mean_s: float
    """Mean time to the first byte of the response."""


class Metrics:
    """The metrics registry of one process."""

    def __init__(self, engine: Engine, hub: Hub) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.requests = Counter(
            "mizzen_api_requests", "Requests to the API", ["method", "route", "status"], registry=self.registry
        )
        self.seconds = Histogram(
            "mizzen_api_request_seconds", "Time to the first byte of the response", ["method", "route"],
            buckets=_BUCKETS, registry=self.registry,
        )  # fmt: skip
        followers = Gauge("mizzen_api_followers", "Open event and log streams", registry=self.registry)
        followers.set_function(lambda: float(hub.followers))
        self.registry.register(InstallationCollector(engine))

    def served(self) -> Served:
        """Returns the sums over all routes."""
        counts = [one for family in self.requests.collect() for one in family.samples if one.name.endswith("_total")]
        seconds = [one for family in self.seconds.collect() for one in family.samples if one.name.endswith("_sum")]
        requests = int(sum(one.value for one in counts))
        failed = sum(one.value for one in counts if one.labels["status"].startswith("5"))
        return Served(requests, int(failed), sum(one.value for one in seconds) / max(1, requests))


class Counting:
    """ASGI middleware: counts requests by route template, so that ids do not become labels."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the ASGI specification."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s = time.perf_counter()

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = getattr(scope.get("route"), "path", "none")
                method = scope["method"] if scope["method"] in _METHODS else "other"
                self._metrics.requests.labels(method, route, str(message["status"])).inc()
                self._metrics.seconds.labels(method, route).observe(time.perf_counter() - began_s)
            await send(message)

        await self._app(scope, receive, counted)


_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
