"""Settings of the scheduler, bucket checks, workloads' lifecycles, reconciliation, pools of machines, and tasks."""

from typing import Annotated

from pydantic import AfterValidator, Field, StringConstraints

from domain.isolation import Isolation, TaskNetwork, sandbox_path
from infra.config.section import Section


class SchedulerSettings(Section):
    """Constants of the global (GMS) and regional (RMS) scheduler."""

    scan_interval_s: float = Field(300.0, gt=0)
    """Maximum interval between two scan passes (MAST 4.2). Changes start a pass much sooner."""
    wake_interval_s: float = Field(0.1, gt=0)
    """Minimum interval between two passes that are started by changes of the queue or the fleet. A longer interval
    delays placement, but costs less CPU when many changes arrive one by one."""
    wakes_per_s: float = Field(2.5, gt=0)
    """Maximum average rate of passes that are started by changes. After a quiet time a burst of ten more is allowed."""
    pass_share: float = Field(0.15, gt=0, le=1)
    """Maximum fraction of the process's time for passes. After a long pass the next one is delayed by at most 1 s."""
    w_age: float = Field(1.0 / 3600, ge=0)
    """Credit per second of waiting (expression 10)."""
    age_cap_s: float = Field(7 * 86400.0, ge=0)
    w_fair: float = Field(10.0, ge=0)
    """Weight of the fair-share term, which compares the tenant's recent use with that of others (expression 11)."""
    w_user: float = Field(10.0, ge=0)
    """Weight of the recent use of a person among the workloads of equal rank of a tenant."""
    w_short: float = Field(10.0, ge=0)
    """Weight of a short maximum runtime among the workloads of equal rank of a tenant."""
    fair_window_s: float = Field(86400.0, gt=0)
    """Window over which the use of tenants and people is averaged, in seconds."""
    min_runtime_s: float = Field(120.0, ge=0)
    """A workload that started less than this ago is not evicted."""
    moves_per_h: int = Field(0, ge=0)
    """Maximum number of running over-quota workloads that are moved in any hour, so that whole machines become free for
    gangs that wait; 0: none."""
    repair: bool = True
    """Whether a gang that loses a machine continues on its other machines, and for the missing tasks on slots nearby
    that are free or that it may evict for, without returning to the queue."""
    grow: bool = True
    """Whether running elastic workloads are started again with more tasks, if slots are free that no workload waits
    for."""
    shrink: bool = False
    """Whether an elastic workload that is evicted continues at once with the tasks that its evictor leaves it."""
    batch: int = Field(256, gt=0)
    """Number of workloads on which regions bid in one round."""
    bid_deadline_s: float = Field(2.0, gt=0)
    """How long a pass waits for a region's bids. If a region misses this deadline, later passes skip it, and it is
    probed with backoff."""
    bid_timeout_s: float = Field(30.0, gt=0)
    """Timeout of a probe of a region that missed the deadline. Passes do not wait for probes."""
    silent_backoff_s: float = Field(2.0, gt=0)
    """First pause before a region that missed the deadline is probed. It doubles after each failed probe."""
    silent_backoff_max_s: float = Field(60.0, gt=0)
    reserve_after_s: float = Field(3600.0, ge=0)
    """If a within-quota workload has waited longer than this, it reserves resources also against workloads of its own
    rank, as they become free at known times. `.inf`: there are no reservations."""


class BucketSettings(Section):
    """Health checks of the regions' buckets. A region whose bucket fails them gets no work."""

    interval_s: float = Field(10.0, gt=0)
    """Interval between two checks of a healthy bucket."""
    timeout_s: float = Field(5.0, gt=0)
    """Timeout of one check."""
    failures: int = Field(2, gt=0)
    """Number of consecutive failed checks after which the region gets no work."""
    retry_s: float = Field(1.0, gt=0)
    """Pause after the first failed check. It doubles after each further failure."""
    retry_max_s: float = Field(30.0, gt=0)


class LifecycleSettings(Section):
    """Timeouts, intervals and retention times of workloads and machines."""

    heartbeat_timeout_s: float = Field(30.0, gt=0)
    node_lost_after_s: float = Field(30.0, gt=0)
    """Time after a missed heartbeat until the machine is declared lost, unless its agent reconnects. The agent of an
    idle machine sends heartbeats so rarely that this leaves it only the rest of this time and of the timeout."""
    cordon_after_failed_gangs: int = Field(3, gt=0)
    lent_launch_s: float = Field(60.0, gt=0, le=600)
    """The shortest time that machines which owners lend have to start a gang. The limit follows what launches take on
    other machines (`domain.lifecycle.launch_limits`)."""
    lent_gpus: int = Field(16, ge=0)
    """Maximum GPUs of a lent machine. One that claims more gets work only after an operator has uncordoned it."""
    collect_interval_s: float = Field(10.0, gt=0)
    """Interval at which progress is read from heartbeats."""
    collect_at_most: int = Field(200, gt=0)
    """Maximum number of workloads whose progress is read per interval. If more run, each is read less often."""
    keep_finished_s: float = Field(14 * 86400.0, gt=0)
    """How long logs and checkpoints of finished workloads are kept, in seconds."""
    keep_archives_s: float = Field(30 * 86400.0, gt=0)
    """How long an uploaded working directory is kept, in seconds. It is kept longer while an unfinished workload uses
    it."""
    keep_records_s: float = Field(90 * 86400.0, gt=0)
    """How long the records of finished workloads are kept, in seconds."""
    keep_fleet_history_s: float = Field(14 * 86400.0, ge=86400)
    """How far back the console shows the fleet, in seconds. The states of machines are kept as long, and what they held
    as long as the records of workloads."""
    dropped_stores: tuple[Annotated[str, StringConstraints(pattern=r"^(file:///|s3://|gs://).")], ...] = ()
    """URLs of stores of clusters that were lost for good. Workloads that used them expire without them."""


class ReconcileSettings(Section):
    """Reconciliation of Temporal with Postgres, which repairs workflows that are missing or were rolled back."""

    interval_s: float = Field(10.0, gt=0)
    """Interval between two comparisons."""
    budget: float = Field(0.02, gt=0, le=1)
    """Maximum fraction of the time that comparisons take. After a long comparison the pause is longer."""
    disagree_s: float = Field(30.0, ge=0)
    """How long the difference between a workflow and Postgres must persist, unchanged, before the workflow is repaired.
    Temporal's listings are delayed."""
    sweep_s: float = Field(600.0, gt=0)
    """Maximum interval between two complete listings of the workflows, even if their count shows no difference."""
    singletons_s: float = Field(10.0, gt=0)
    """Interval at which missing singleton workflows, schedules and search attributes are created again."""


class CapacitySettings(Section):
    """Machines that are launched at providers."""

    interval_s: float = Field(10.0, gt=0)
    """Interval at which pools are compared with the ledger, and the ledger with the providers' lists of machines."""
    plan_interval_s: float = Field(1800.0, gt=0)
    """Longest time between two plans of the pools of a region. A plan also follows a change of sizes or machines."""
    move_machines: bool = True
    """Whether plans of pools are carried out. If not, they are only shown."""
    moving_share: float = Field(0.01, gt=0, le=1)
    """The largest share of a region's planned machines that changes its pool at a time; at least one machine."""
    pool_patience_s: float = Field(900.0, ge=0)
    """A machine that is lost stays in plans of pools for this long, and one that has moved stays in its pool."""
    join_s: float = Field(900.0, gt=0)
    """Time after its start within which a machine must become ready. Otherwise it is terminated."""
    drain_s: float = Field(600.0, ge=0)
    """Maximum time to drain a machine before it is terminated."""
    lost_after_s: float = Field(600.0, gt=0)
    """If a machine's agent is disconnected for this long, the machine is terminated and replaced."""
    hold_s: float = Field(1800.0, ge=0)
    """A machine that waits for the other machines of its workload is ended after it has been idle for this long."""
    no_work_s: float = Field(600.0, ge=0)
    """A machine whose provider ends it within this time gets no new work."""
    leave_s: float = Field(120.0, ge=0)
    """How long before the provider's end of a machine its tasks get notice, in seconds."""
    refused_pause_s: float = Field(120.0, ge=0)
    """After a provider has refused to launch an offer, the offer is not requested again for this long."""


class ServiceSettings(Section):
    """Services and their replicas."""

    interval_s: float = Field(30.0, gt=0)
    """Longest time between two decisions about a service. Changes of its replicas lead to a decision at once."""
    scaling_interval_s: float = Field(5.0, gt=0)
    """Longest time between two decisions about a service whose number of replicas follows its requests."""
    readiness_interval_s: float = Field(1.0, gt=0)
    """Interval at which the readiness of starting replicas is read."""
    unready_s: float = Field(180.0, ge=0)
    """A replica that was ready is ended after its probe has failed, or balancers have ejected it, for this long."""
    placement_s: float = Field(300.0, gt=0)
    """If a replica is not placed within this time after its own machines are ready, it is ended with its machines."""
    tenant_machines: int = Field(200, ge=0)
    """The largest number of machines that the services of one tenant may have launched at a time."""
    update_queued_s: float = Field(1800.0, gt=0)
    """An update of which no replica has been ready is given up after one has waited this long for machines of the
    installation."""
    failed_pause_s: float = Field(5.0, gt=0)
    """Pause after a replica has failed by itself. It doubles with each failure in a row."""
    retry_s: float = Field(300.0, ge=0)
    """Time after which a policy tries a zone again that refused a launch."""
    policy_speed: float = Field(1.0, gt=0)
    """The seconds that pass for the policies of spot machines in one second, also for `retry_s` and outage prices. For
    an emulated cloud with the same `speed` only. A change does not apply to what the policies have learned before."""
    silent_s: float = Field(30.0, gt=0)
    """If no balancer has reported requests for this long, the number of replicas stops following the requests."""


class ReclaimSettings(Section):
    """Machines whose owners can take them back, and the jobs on them (ReclaimNet)."""

    control_period_s: float = Field(300.0, gt=0)
    """Interval at which upper limits for checkpoint intervals are recomputed, from the current hazard of departures."""
    loss_budget_s: float = Field(1800.0, gt=0)
    """Maximum mean work that a departure without notice may lose, in seconds (L_max): half of the longest interval."""
    checkpoint_bytes_s: float = Field(87.5e6, gt=0)
    """Bandwidth that the checkpoints of all jobs on lent machines that save to the same store may use on average, in
    bytes per second. The default is 70 % of a link of 1 Gbit/s."""


def _sandbox_path(text: str) -> str:
    sandbox_path(text)
    return text


class TaskSettings(Section):
    """Limits and isolation of tasks on machines, and how long agents keep their data."""

    keep_runs_s: float = Field(600.0, ge=0)
    """How long an attempt's folder is kept on its machine after all output was shipped, in seconds."""
    keep_at_most_s: float = Field(14 * 86400.0, ge=0)
    """The longest time for which a document may keep working directories (`keep`), in seconds."""
    keep_free: float = Field(0.1, ge=0, le=1)
    """While less than this fraction of a machine's disk is free, folders that documents keep are removed, oldest
    first."""
    keep_images_s: float = Field(7 * 86400.0, ge=0)
    """How long an image of a container is kept on its machine after its last use, in seconds. Only images that agents
    have fetched are removed."""
    images_bytes: int = Field(100 << 30, ge=0)
    """The most that these images may have together on a machine. Beyond it, the longest unused ones are removed. Layers
    that several images share count for each."""
    image_bytes_s: float | None = Field(None, ge=10_000)
    """The bandwidth of a machine that fetches of images may have together, in bytes per second. None: any. Needs an
    agent that runs as root, and an engine with a cgroup v2 of its own, as a service of systemd has; else there is no
    limit."""
    disk_fraction: float | None = Field(0.9, gt=0, le=1)
    """The part of the free space of a machine's disk that its tasks may use together, each attempt in proportion to its
    share of the machine. The same for the number of files. None: no limit."""
    output_bytes: int = Field(1 << 30, ge=1 << 22)
    """Limit on the disk space that one task's output uses on its machine. Beyond it, output that was shipped to the
    bucket is freed first, then the oldest output that was not. A line in the log marks missing output."""
    log_bytes: int = Field(10 << 30, ge=1 << 20)
    """Size of the log of a task and attempt in the bucket from which on no output is stored, except the end, after the
    task has ended. A line in the log marks missing output."""
    largest_output_bytes: int = Field(50 << 30, ge=0)
    """Maximum size of one output of one task (`outputs` of a document), in bytes. A larger one is not stored."""
    largest_output_files: int = Field(100_000, ge=0)
    """Maximum number of files and folders of one output of one task."""
    keep_stopped_s: float = Field(14 * 86400.0, gt=0)
    """How long an agent keeps the record of a workload's stopped attempts, in seconds. The agent would not refuse a
    start that Temporal delivers later than this."""

    checkpoint_memory: float = Field(0.0, ge=0, le=0.5)
    """The part of each machine's memory that holds checkpoints of trainings with tiers (docs/checkpoints.md). Tasks do
    not get it. 0: none; then the memory of a training's checkpoints is part of its tasks', and ends with them."""
    keep_memory_s: float = Field(600.0, ge=0)
    """How long these checkpoints stay in the memory of a machine without a task of their workload, in seconds."""
    limits: bool = True
    """Whether each task gets cgroups with limits on memory and processes and a CPU weight from its resource request, if
    the agent may create them."""
    processes_per_task: int = Field(128, gt=0)
    """Number of processes and threads that every task may have, whatever its resource request."""
    processes_per_cpu: int = Field(128, ge=0)
    """Number of processes and threads that a task may have in addition for each CPU that it requests."""
    isolation: Isolation | None = None
    """How tasks are separated on machines whose cluster or agent does not say it: `sandbox`, `user` or `none`. None:
    the strongest that the machine has."""
    network: TaskNetwork = TaskNetwork.HOST
    """The network of tasks: `host`, that of the machine, or `ports`: one of each attempt on a machine, to which only
    the ports of its services and rendezvous lead. `ports` needs sandboxes and slirp4netns; such machines run no
    images."""
    container_engine: str = Field("auto", pattern="^(auto|none|/.*)$")
    """The container engine for jobs with an image: path of the socket of Docker or Podman, `auto` (the usual paths) or
    `none`."""
    registries: tuple[str, ...] = ()
    """Registries of images, each `HOST` or `HOST:PORT`, that may be used although they are not at public addresses. One
    that begins with `http://` is asked without encryption."""
    s3_role: str | None = None
    """ARN of the role that agents assume for tasks, narrowed to the checkpoints and tables of the workload. None: tasks
    get no credentials for S3."""
    gcs_tokens: bool = False
    """Whether tasks get their agent's tokens for Google Cloud Storage, restricted to the same objects."""
    credentials_s: float = Field(3600.0, ge=900, le=43200)
    """How long the credentials from `s3_role` are valid, in seconds. They are renewed after half of it."""
    metadata_service: bool = False
    """Whether tasks may connect to the metadata service of a cloud, which has credentials of the machine. False has an
    effect where tasks run as other users or in sandboxes, and the agent runs as root and may load eBPF programs, and
    with the network `ports`."""
    paths: tuple[Annotated[str, AfterValidator(_sandbox_path)], ...] = ()
    """Folders and files of machines that tasks in a sandbox see, besides those of the system and their own. An entry
    that ends with `:rw` may also be changed, as far as the tasks' user may."""
    first_uid: int = Field(2_000_000, gt=0)
    """First user id of the tenants' range: a tenant's user id is this plus the tenant's number. Must be the same on all
    machines that share a local folder as bucket."""
    uids: int = Field(100_000, gt=0)
    """Number of user ids in the tenants' range."""
