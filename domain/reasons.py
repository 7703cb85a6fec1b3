"""Reasons why a workload, machine or instance waits, was refused, was evicted or was stopped.

A reason is a code from a closed list, with details. Programs read the code and the details; the sentence for people is
generated from them and must not be parsed.
"""

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from math import ceil
from typing import Any


class ReasonCode(StrEnum):
    """The closed list of reason codes. The values appear in the API, in events and in search attributes."""

    # Why a workload is not placed.
    SCAN_PENDING = "scan_pending"
    HELD = "held"
    DEPENDENCY = "dependency"
    DEPENDENCY_NEVER = "dependency_never"
    ELEMENT_DEPENDENCY = "element_dependency"
    PARTITION_MISSING = "partition_missing"
    NOT_BEFORE = "not_before"
    QUOTA_EXCEEDED = "quota_exceeded"
    REGION_EXCLUDED = "region_excluded"
    REGION_SILENT = "region_silent"
    BUCKET_UNAVAILABLE = "bucket_unavailable"
    SCAN_OVERDUE = "scan_overdue"
    NO_HARDWARE = "no_hardware"
    DATA_NOT_HERE = "data_not_here"
    DATA_STALE = "data_stale"
    DATA_NOWHERE = "data_nowhere"
    REPLICATING_DATA = "replicating_data"
    NO_STORAGE = "no_storage"
    INSUFFICIENT_CAPACITY = "insufficient_capacity"
    MACHINES_AVOIDED = "machines_avoided"
    IN_OTHER_POOLS = "in_other_pools"
    ISOLATION_TOO_WEAK = "isolation_too_weak"
    NO_CONTAINER_ENGINE = "no_container_engine"
    SPREAD_REQUIRED = "spread_required"
    NOT_TOGETHER = "not_together"
    REFUSED_LIKE = "refused_like"
    RESERVED = "reserved"
    RESERVED_OPEN = "reserved_open"
    WAITING_FOR_CAPACITY = "waiting_for_capacity"
    AWARD_CONFLICT = "award_conflict"
    ARRAY_THROTTLED = "array_throttled"
    ARRAY_STARTED = "array_started"
    RUNNERS_THROTTLED = "runners_throttled"
    RUNNERS_BUSY = "runners_busy"
    # Why a placed workload is not running yet.
    WAITING_FOR_VICTIMS = "waiting_for_victims"
    STAGING_FAILED = "staging_failed"
    COPYING_CHECKPOINT = "copying_checkpoint"
    STARTING_TASKS = "starting_tasks"
    PREPARING = "preparing"
    RUNNING = "running"
    FEWER_TASKS = "fewer_tasks"
    # Why a workload was placed, stopped or moved.
    AWARDED = "awarded"
    EVICTED = "evicted"
    MOVED = "moved"
    RESIZED = "resized"
    SHRUNK = "shrunk"
    PREEMPTED_BY_OPERATOR = "preempted_by_operator"
    MACHINE_DRAINED = "machine_drained"
    MACHINE_LOST = "machine_lost"
    PLATFORM_NOTICE = "platform_notice"
    LAUNCH_FAILED = "launch_failed"
    LAUNCH_TIMED_OUT = "launch_timed_out"
    CANNOT_START = "cannot_start"
    UNCONFIRMED_FAILURE = "unconfirmed_failure"
    NO_PROGRESS = "no_progress"
    STACK_STOPPED = "stack_stopped"
    # Why a workload ended.
    COMPLETED = "completed"
    TASK_FAILED = "task_failed"
    OUT_OF_MEMORY = "out_of_memory"
    OUT_OF_DISK = "out_of_disk"
    SETUP_FAILED = "setup_failed"
    SAVES_FAILED = "saves_failed"
    NOT_READY = "not_ready"
    RETRIES_EXHAUSTED = "retries_exhausted"
    RESTARTS_EXHAUSTED = "restarts_exhausted"
    CHECKPOINT_UNLOADABLE = "checkpoint_unloadable"
    MAX_RUNTIME = "max_runtime"
    PENDING_EXPIRED = "pending_expired"
    CANCELLED_BY_USER = "cancelled_by_user"
    AT_MOST_ONCE = "at_most_once"
    ARRAY_ENDED = "array_ended"
    OUTPUTS_NOT_STORED = "outputs_not_stored"
    # Why a machine is cordoned.
    CORDONED_BY_OPERATOR = "cordoned_by_operator"
    MOVES_POOL = "moves_pool"
    KEEPS_FAILING_GANGS = "keeps_failing_gangs"
    KEY_NOT_TRUSTED = "key_not_trusted"
    CLAIMS_TOO_MUCH = "claims_too_much"
    GPU_FAULT = "gpu_fault"
    # The state of an instance, and why it ended.
    LAUNCHING = "launching"
    LAUNCH_UNCONFIRMED = "launch_unconfirmed"
    PENDING_AT_PROVIDER = "pending_at_provider"
    END_UNCONFIRMED = "end_unconfirmed"
    AWAITING_AGENT = "awaiting_agent"
    JOINED = "joined"
    POOL_SHRINKS = "pool_shrinks"
    IDLE = "idle"
    GANG_INCOMPLETE = "gang_incomplete"
    ENDED_BY_OPERATOR = "ended_by_operator"
    CAPACITY_REFUSED = "capacity_refused"
    PROVIDER_QUOTA = "provider_quota"
    LAUNCH_REQUEST_REFUSED = "launch_request_refused"
    NO_OFFER = "no_offer"
    PROVIDER_SILENT = "provider_silent"
    PROVIDER_IMPAIRED = "provider_impaired"
    NEVER_JOINED = "never_joined"
    NOT_AT_PROVIDER = "not_at_provider"
    ENDED_AT_PROVIDER = "ended_at_provider"
    LEFT_AT_PROVIDER = "left_at_provider"
    ENDS_SOON = "ends_soon"
    AGENT_AWAY = "agent_away"
    REPLICA_ENDED = "replica_ended"


_AGAIN = "{retry_at:?; it is tried again from {retry_at} on}"
_SENTENCES: dict[ReasonCode, str] = {
    ReasonCode.SCAN_PENDING: "waits for the next scan of the queue",
    ReasonCode.HELD: "held by {by}; `mizzen release` ends the hold",
    ReasonCode.DEPENDENCY: "waits until {name} ({workload}) has {condition}; it is {phase}",
    ReasonCode.DEPENDENCY_NEVER: (
        "it depends on {name} ({workload}) having {condition}, which cannot happen any more: it is {phase}"
        "{kept:?; `mizzen release` gives this condition up}"
    ),
    ReasonCode.ELEMENT_DEPENDENCY: (
        "{elements:1 element waits|# elements wait} until the elements of the same index of {name} ({workload}) have"
        " {condition}"
    ),
    ReasonCode.PARTITION_MISSING: "waits until table {table} has the partition {partition}",
    ReasonCode.NOT_BEFORE: "its document does not let it start before {at}",
    ReasonCode.QUOTA_EXCEEDED: "tenant {tenant} uses {used} of {quota} {resource} and this workload needs {needs} more",
    ReasonCode.REGION_EXCLUDED: "the workload's regions do not include {region}",
    ReasonCode.REGION_SILENT: (
        "region {region} has not answered since {since}; it is left out until one of its schedulers answers"
    ),
    ReasonCode.BUCKET_UNAVAILABLE: (
        "the bucket of region {region} has not answered since {since} ({error}); nothing is placed there until it does"
    ),
    ReasonCode.SCAN_OVERDUE: (
        "no scan of the queue has included it since {since}; check that a worker with the role control is running"
    ),
    ReasonCode.NO_HARDWARE: "region {region} has no cluster whose machines can hold job {job} ({needs})",
    ReasonCode.DATA_NOT_HERE: "region {region} has no complete replica of table {table}",
    ReasonCode.DATA_STALE: (
        "the replica of table {table} in region {region} has been stale since {stale_since}; workloads of priority 1"
        " and 2 read only complete replicas"
    ),
    ReasonCode.DATA_NOWHERE: "no region has a complete replica of table {table}",
    ReasonCode.REPLICATING_DATA: (
        "table {table} is being copied to {region}: {done_bytes} of {total_bytes:1 byte|# bytes}"
    ),
    ReasonCode.NO_STORAGE: (
        "copying its tables to region {region} needs {more_bytes:1 byte|# bytes}; the region stores {stored_bytes}"
        " of {storage_bytes}"
    ),
    ReasonCode.INSUFFICIENT_CAPACITY: (
        "region {region} can now place {placeable} of {tasks:1 task|# tasks} of job {job}"
        "{evictable:; no workload of lower priority can be evicted|"
        ", even if it evicts 1 workload of lower priority|"
        ", even if it evicts # workloads of lower priority}"
        "{protected_until:?; those that started recently are protected from eviction, the first until"
        " {protected_until}}"
        "{own:?; it does not evict {own:1 over-quota workload|# over-quota workloads} of its own tenant with an equal"
        " or better level}"
    ),
    ReasonCode.MACHINES_AVOIDED: (
        "it is not placed on {machines}{until:? until {until}}: it failed or did not start there, and no other"
        " machine has confirmed that this is its own fault"
    ),
    ReasonCode.IN_OTHER_POOLS: "only tenants of {pools} may use the machines of these pools in region {region}",
    ReasonCode.ISOLATION_TOO_WEAK: (
        "it is not placed on {machines} in region {region}: their isolation of tasks is weaker than its document or its"
        " tenant requires"
    ),
    ReasonCode.NO_CONTAINER_ENGINE: (
        "it is not placed on {machines} in region {region}: they have no container engine, which its image needs"
    ),
    ReasonCode.NOT_TOGETHER: (
        "{tasks:1 task|# tasks} of job {job} must be in one {level}, and region {region} has room for {places} of"
        " {groups} such groups; its largest {level} has room for {largest:1 task|# tasks}, {free} of them without"
        " evictions"
    ),
    ReasonCode.SPREAD_REQUIRED: (
        "it is not placed on {level} {places} of region {region}: other replicas of its service are there, and its"
        " document requires another {level} for each replica"
    ),
    ReasonCode.REFUSED_LIKE: (
        "region {region} has no room for {needs}, and job {job} needs at least as much"
        "{protected_until:?; workloads of lower priority that started recently are protected from eviction, the first"
        " until {protected_until}}"
    ),
    ReasonCode.RESERVED: (
        "slots that become free in region {region} are reserved for it; it starts at {starts_at} at the latest"
    ),
    ReasonCode.RESERVED_OPEN: (
        "slots that become free in region {region} are reserved for it; its start depends on workloads that have no"
        " known end, or that are being evicted"
    ),
    ReasonCode.WAITING_FOR_CAPACITY: (
        "launching {machines} {machine_type} in {zone}, expected in {expected_s:1 second|# seconds}"
        "{words:?; the provider says: {words}}"
    ),
    ReasonCode.AWARD_CONFLICT: "region {region} changed between its bid and the award; it bids again",
    ReasonCode.ARRAY_THROTTLED: (
        "{placed:1 element holds|# elements hold} slots{older:?, older ones come first}, and the throttle of the array"
        " is {throttle}; `mizzen throttle` changes it"
    ),
    ReasonCode.RUNNERS_THROTTLED: (
        "{placed:1 runner holds|# runners hold} slots{older:?, older ones come first}, and the throttle of the array is"
        " {throttle}; `mizzen throttle` changes it"
    ),
    ReasonCode.RUNNERS_BUSY: (
        "waits for a runner of the array; {placed:1 holds|# hold} slots, and no more are needed for what waits"
    ),
    ReasonCode.ARRAY_STARTED: "none of its elements waits; {live} of {elements} have not ended",
    ReasonCode.WAITING_FOR_VICTIMS: "waits for the slots of {victims}, which it evicts",
    ReasonCode.STAGING_FAILED: "its start in region {region} cannot be prepared: {error}; retried until it succeeds",
    ReasonCode.COPYING_CHECKPOINT: "its checkpoint is being copied from {source} to {region}",
    ReasonCode.STARTING_TASKS: "starting {tasks:1 task|# tasks} on {machines:1 machine|# machines}",
    ReasonCode.PREPARING: "machine {machine}: {waits_for}",
    ReasonCode.RUNNING: "attempt {attempt} has run in {region} since {since}",
    ReasonCode.FEWER_TASKS: (
        "it runs with {tasks:1 task|# tasks} of at most {most}; unless the operator has switched growth off, it is"
        " started again with more if slots are free that its tenant's quota admits and no workload waits for, and if"
        " the added work exceeds the cost of the restart"
    ),
    ReasonCode.AWARDED: (
        "placed in {region} on {machines:1 machine|# machines}{victims:|, evicting 1 workload|, evicting # workloads}"
    ),
    ReasonCode.EVICTED: "evicted by {evictor} (rank {evictor_rank} against {rank})",
    ReasonCode.MOVED: (
        "moved from {from} to {to}, so that {freed:1 whole machine becomes|# whole machines become} free; it continues"
        " from its checkpoint"
    ),
    ReasonCode.SHRUNK: (
        "shrunk from {tasks} to {fewer:1 task|# tasks} for {evictor}, which has evicted it; it continues from its"
        " checkpoint"
    ),
    ReasonCode.RESIZED: "stopped with {tasks:1 task|# tasks}, to continue from its checkpoint with {more}",
    ReasonCode.PREEMPTED_BY_OPERATOR: "preempted by {by}",
    ReasonCode.MOVES_POOL: "it moves to pool {pool} when no workload is left on it that the pool does not serve",
    ReasonCode.MACHINE_DRAINED: "machine {machine} is being drained{pool:?, because it moves to pool {pool}}",
    ReasonCode.MACHINE_LOST: "machine {machine} stopped answering{words:?: {words}}",
    ReasonCode.PLATFORM_NOTICE: "{platform} reclaims machine {machine} ({notice}): {words}",
    ReasonCode.LAUNCH_FAILED: "tasks could not be started on {machine}: {error}",
    ReasonCode.LAUNCH_TIMED_OUT: (
        "machine {machine}, which its owner lends, did not start the tasks within {limit_s} s; the workload is tried"
        " again without it"
    ),
    ReasonCode.CANNOT_START: "its tasks cannot be started on any machine: {error}",
    ReasonCode.UNCONFIRMED_FAILURE: (
        "{words}; a machine that its owner lends may be the cause, so the failure does not count, and the workload is"
        " tried again without {avoided} ({attempts} of at most {limit:1 attempt|# attempts} in a row)"
    ),
    ReasonCode.NO_PROGRESS: "no progress for {silent_s} s; its limit is {limit_s} s",
    ReasonCode.STACK_STOPPED: "mizzen was stopped; the workload continues at the next start",
    ReasonCode.COMPLETED: "{tasks:its task|all # tasks} ended with exit code 0",
    ReasonCode.TASK_FAILED: "task {task} ended with {status}",
    ReasonCode.OUT_OF_MEMORY: (
        "task {task} ran out of memory: it used {peak_bytes} of the {limit_bytes:1 byte|# bytes} that its"
        " document asks for"
    ),
    ReasonCode.OUT_OF_DISK: (
        "task {task} ran out of disk space: the workload's tasks on {machine} had {used_bytes} of"
        " {limit_bytes:1 byte|# bytes}, and {used_files} of {limit_files:1 file|# files}, which is their share"
    ),
    ReasonCode.SETUP_FAILED: "setup of task {task} failed with {status}",
    ReasonCode.SAVES_FAILED: "task {task} ended with {status} because its checkpoints could not be saved: {error}",
    ReasonCode.NOT_READY: (
        "task {task} did not become ready within {limit_s} s, the limit in its readiness_probe; last probe: {error}"
    ),
    ReasonCode.RETRIES_EXHAUSTED: (
        "task {task} ended with {status} and {retries:no retries are allowed|its 1 retry is used up|all # retries are"
        " used up}{exit:? for exit status {exit}}"
    ),
    ReasonCode.RESTARTS_EXHAUSTED: (
        "{words}; limits.retries.{limit} of its document allows {retries:no restart|1 restart|# restarts} after this"
    ),
    ReasonCode.CHECKPOINT_UNLOADABLE: (
        "task {task} could not load its checkpoint"
        " ({failures} of at most {limit:1 attempt|# attempts} in a row): {error}"
    ),
    ReasonCode.OUTPUTS_NOT_STORED: (
        "output {name} of task {task} was not stored: {why}{more:|, and 1 more was not|, and # more were not}"
    ),
    ReasonCode.MAX_RUNTIME: "ran for {ran_s} s; its maximum runtime is {limit_s} s",
    ReasonCode.PENDING_EXPIRED: "waited in the queue for {waited_s} s; its limit is {limit_s} s",
    ReasonCode.CANCELLED_BY_USER: "cancelled by {by}",
    ReasonCode.AT_MOST_ONCE: (
        "runner {runner} may have started it before its end ({words}), and by array.runners.at_most_once it is not"
        " started again"
    ),
    ReasonCode.ARRAY_ENDED: (
        "{succeeded} of {elements:1 element|# elements} succeeded, {failed} failed, {cancelled:1 was|# were} cancelled"
    ),
    ReasonCode.CORDONED_BY_OPERATOR: "cordoned by {by}",
    ReasonCode.KEY_NOT_TRUSTED: (
        "its agent registers with the key {key}, but the machine's pinned key is {pinned};"
        " `mizzen machines trust` accepts the new key"
    ),
    ReasonCode.CLAIMS_TOO_MUCH: (
        "its agent claims {gpus} GPUs, and a lent machine may have at most {limit:1 GPU|# GPUs} unless an operator"
        " has checked it; `mizzen machines uncordon` admits it"
    ),
    ReasonCode.GPU_FAULT: (
        "GPU {slot} ({gpu}) has failed: {error}; `mizzen machines uncordon` after it was reset or replaced"
    ),
    ReasonCode.LAUNCHING: "launching {machine_type} ({kind}) in {zone} at {provider}, for pool {pool}",
    ReasonCode.LAUNCH_UNCONFIRMED: "{provider} has not confirmed the launch, which is repeated: {words}",
    ReasonCode.END_UNCONFIRMED: "{provider} has not confirmed the end, which is requested again: {words}",
    ReasonCode.PENDING_AT_PROVIDER: (
        "{provider} has accepted the launch and has not started the machine: {words}"
        "{starts_at:?; it expects to start it at {starts_at}}"
    ),
    ReasonCode.AWAITING_AGENT: "launched by {provider}; its agent has not registered yet",
    ReasonCode.JOINED: "its machine has joined the fleet",
    ReasonCode.POOL_SHRINKS: "pool {pool} shrinks to {size:1 machine|# machines}",
    ReasonCode.IDLE: "it has had no work for {idle_s} s, and pool {pool} has more machines than its size",
    ReasonCode.GANG_INCOMPLETE: (
        "it has waited for {idle_s} s for the other machines of {workloads}, and they have not come"
    ),
    ReasonCode.ENDED_BY_OPERATOR: "ended by {by}",
    ReasonCode.CAPACITY_REFUSED: f"{{provider}} has no {{machine_type}} ({{kind}}) in {{zone}} now: {{words}}{_AGAIN}",
    ReasonCode.PROVIDER_QUOTA: (
        f"{{provider}} allows no more {{machine_type}} ({{kind}}) in {{zone}}: {{words}}{_AGAIN}"
    ),
    ReasonCode.LAUNCH_REQUEST_REFUSED: (
        f"{{provider}} refused to launch {{machine_type}} ({{kind}}) in {{zone}}: {{words}}{_AGAIN}"
    ),
    ReasonCode.NO_OFFER: "no provider offers machines that pool {pool} may use in region {region}",
    ReasonCode.PROVIDER_SILENT: (
        "pool {pool} launches nothing in region {region} until provider {provider} answers: {words}"
    ),
    ReasonCode.PROVIDER_IMPAIRED: "provider {provider} of pool {pool} in region {region} works only in part: {words}",
    ReasonCode.NEVER_JOINED: "its agent was not ready {waited_s} s after the launch",
    ReasonCode.ENDED_AT_PROVIDER: "{provider} says that its machine has ended: {words}",
    ReasonCode.LEFT_AT_PROVIDER: "{provider} wants its machine to be left: {words}",
    ReasonCode.ENDS_SOON: "{provider} ends it at {ends_at}, so it gets no new work",
    ReasonCode.NOT_AT_PROVIDER: "{provider} no longer has this instance",
    ReasonCode.AGENT_AWAY: "its agent has not answered since {since}",
    ReasonCode.REPLICA_ENDED: "replica {replica} of service {service}, which it was launched for, has ended",
    ReasonCode.KEEPS_FAILING_GANGS: (
        "{failures:1 workload|# workloads in a row} lost tasks or failed to start them here; the last was {workload}"
    ),
}


class _Sentences(string.Formatter):
    """Formats a sentence. A field with forms is `{n:one|many}` or `{n:none|one|many}`, where `#` stands for the number.

    A missing value is written as `?`. The text in `{n:?text}` is left out if the value is missing.
    """

    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        value = kwargs.get(str(key), "?")
        return ", ".join(map(str, value)) if isinstance(value, list | tuple) else value

    def format_field(self, value: Any, format_spec: str) -> str:
        if not format_spec:
            return str(value)
        if format_spec.startswith("?"):
            return "" if value == "?" else format_spec[1:]
        *fewer, many = format_spec.split("|")
        form = {0: fewer[0] if len(fewer) == 2 else many, 1: fewer[-1]}.get(value, many)
        return form.replace("#", str(value))


_FORMATTER = _Sentences()


@dataclass(frozen=True)
class Reason:
    """A reason code and its details. `str()` returns `code: sentence`."""

    code: ReasonCode
    detail: Mapping[str, object] = field(default_factory=dict)

    @property
    def sentence(self) -> str:
        """The sentence of the code, filled in with the details."""
        return _FORMATTER.vformat(_SENTENCES[self.code], (), self.detail)

    def __str__(self) -> str:
        return f"{self.code.value}: {self.sentence}"

    def to_json(self) -> dict[str, object]:
        """Returns `{"code", "detail", "sentence"}`, the form used in the API, in events and in the database."""
        return {"code": self.code.value, "detail": dict(self.detail), "sentence": self.sentence}

    @classmethod
    def from_json(cls, body: Mapping[str, object]) -> "Reason":
        """Parses a reason that `to_json` wrote.

        Raises:
            ValueError: the code is not in the closed list.
        """
        detail = body.get("detail")
        return cls(ReasonCode(str(body["code"])), dict(detail) if isinstance(detail, Mapping) else {})


def in_words(at_s: float) -> str:
    """Returns a time in seconds since the epoch as the details of reasons have it: ISO 8601 in UTC, in whole seconds.

    It is rounded up: a change that is named with its time has happened by then.
    """
    return datetime.fromtimestamp(ceil(at_s), UTC).isoformat()


def running_since(attempt: int, region: str | None, since: datetime) -> Reason:
    """Returns the reason of a running workload, with its attempt, its region and its start time."""
    at = since.astimezone(UTC).isoformat(timespec="seconds")
    return Reason(ReasonCode.RUNNING, {"attempt": attempt, "region": region, "since": at})
