"""Settings of decisions and lifecycles: scheduler, buckets, workloads, reconciliation, pools, tasks."""

from pydantic import Field

from infra.config.section import Section


class SchedulerSettings(Section):
    """Constants of GMS and RMS."""

    scan_interval_s: float = Field(300.0, gt=0)
    """A scan pass at least this often (MAST 4.2); on changes much sooner."""
    wake_interval_s: float = Field(0.1, gt=0)
    """Between two passes that changes of the queue and of the fleet start. A longer interval delays placement by as
    much, and costs less CPU while many changes come one by one."""
    wakes_per_s: float = Field(2.5, gt=0)
    """Such passes while changes never stop; ten more at once after a quiet time."""
    pass_share: float = Field(0.15, gt=0, le=1)
    """The part of its process's time that passes may use: after one that took long the next waits, a second at most."""
    w_age: float = Field(1.0 / 3600, ge=0)
    """Credit per second of waiting (expression 10)."""
    age_cap_s: float = Field(7 * 86400.0, ge=0)
    w_fair: float = Field(10.0, ge=0)
    """Weight of the tenant's share against the others' (expression 11)."""
    fair_window_s: float = Field(86400.0, gt=0)
    """Window over which use is averaged."""
    min_runtime_s: float = Field(120.0, ge=0)
    """A workload that started less than this ago is not evicted."""
    batch: int = Field(256, gt=0)
    """Workloads on which regions bid in one round."""
    bid_deadline_s: float = Field(2.0, gt=0)
    """How long a pass waits for a region's bids. A region that misses it is left out, and asked again with backoff."""
    bid_timeout_s: float = Field(30.0, gt=0)
    """How long a silent region that is asked again may take to answer; no pass waits for that."""
    silent_backoff_s: float = Field(2.0, gt=0)
    """The first pause before a silent region is asked again; each later one is twice as long."""
    silent_backoff_max_s: float = Field(60.0, gt=0)
    joint: bool = False
    """Whether regions for the queue's head are chosen together where one at a time leaves somebody out (MAST 4.1)."""
    reserve_after_s: float = Field(3600.0, ge=0)
    """A workload that has waited longer reserves what it needs as it frees up."""


class BucketSettings(Section):
    """Checks of regions' buckets: a region whose bucket does not answer gets no work."""

    interval_s: float = Field(10.0, gt=0)
    """Between two checks of a bucket that answers."""
    timeout_s: float = Field(5.0, gt=0)
    """How long an answer may take."""
    failures: int = Field(2, gt=0)
    """So many checks in a row must fail before the region is left out."""
    retry_s: float = Field(1.0, gt=0)
    """The pause after a failed check; each later one is twice as long."""
    retry_max_s: float = Field(30.0, gt=0)


class LifecycleSettings(Section):
    """Times of a workload's life."""

    heartbeat_timeout_s: float = Field(30.0, gt=0)
    node_lost_after_s: float = Field(30.0, gt=0)
    """After a missed heartbeat: how long an agent may take to come back before its machine counts as lost. The agent of
    an idle machine may be silent for most of both times, and has the rest to come back."""
    cordon_after_failed_gangs: int = Field(3, gt=0)
    collect_interval_s: float = Field(10.0, gt=0)
    """How often progress is read from heartbeats."""
    collect_at_most: int = Field(200, gt=0)
    """Workloads whose progress is read at a time; with more that run, each is read less often."""
    keep_finished_s: float = Field(14 * 86400.0, gt=0)
    """How long logs and checkpoints of finished workloads are kept."""
    keep_archives_s: float = Field(30 * 86400.0, gt=0)
    """How long an uploaded working directory is kept, and longer while an unfinished workload names it."""
    keep_records_s: float = Field(90 * 86400.0, gt=0)
    """How long finished workloads stay listed."""


class ReconcileSettings(Section):
    """Comparing Temporal with Postgres, which repairs workflows that are gone or were rolled back."""

    interval_s: float = Field(10.0, gt=0)
    """Between two comparisons."""
    budget: float = Field(0.02, gt=0, le=1)
    """The part of the time that comparing may take: after a long comparison the pause is longer."""
    disagree_s: float = Field(30.0, ge=0)
    """How long a workflow must disagree with Postgres, unchanged, before it is repaired: listings lag."""
    sweep_s: float = Field(600.0, gt=0)
    """All workflows are listed at least this often, also where their count gives no reason."""
    singletons_s: float = Field(10.0, gt=0)
    """How often the workflows, schedules and search attributes of the installation are asserted."""


class CapacitySettings(Section):
    """Machines that are asked of providers."""

    interval_s: float = Field(10.0, gt=0)
    """How often pools are compared with the ledger, and the ledger with what providers have."""
    join_s: float = Field(900.0, gt=0)
    """How long after its launch a machine may take until it is ready; then it is ended."""
    drain_s: float = Field(600.0, ge=0)
    """How long what runs on a machine that is to end may take to leave."""
    lost_after_s: float = Field(600.0, gt=0)
    """A machine whose agent has been away for so long is ended, and another one launched in its place."""
    refused_pause_s: float = Field(120.0, ge=0)
    """For how long an offer that was refused is not asked for again."""


class TaskSettings(Section):
    """What tasks may use and see of the machines of an agent, and how long agents remember them."""

    keep_runs_s: float = Field(600.0, ge=0)
    """How long a run's folder stays on its machine after all its output was shipped."""
    output_bytes: int = Field(1 << 30, ge=1 << 22)
    """How much of a task's output may be on its machine's disk. What was shipped to the bucket is freed first, then the
    oldest of what was not, and a line of the log says that output is missing."""
    keep_stopped_s: float = Field(14 * 86400.0, gt=0)
    """How long an agent remembers that a workload's attempts were stopped there: a start that comes later than this,
    which Temporal would have to hold back for so long, would not be refused."""

    limits: bool = True
    """Limit each task's memory and processes, and weigh its CPU, by what it asked for, where the agent may."""
    processes_per_task: int = Field(128, gt=0)
    """A task may have so many processes and threads,"""
    processes_per_cpu: int = Field(128, ge=0)
    """and so many more for each CPU that it asks for."""
    separate_tenants: bool = True
    """Where the agent runs as root and no `run_as` is given: each tenant's tasks run as a user of their own."""
    first_uid: int = Field(2_000_000, gt=0)
    """User ids of tenants: this and their number; the same on all machines that share a bucket of files."""
    uids: int = Field(100_000, gt=0)
