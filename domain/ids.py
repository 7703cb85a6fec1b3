"""Names and ids: their forms, and the ids that are derived from others."""

import re
import secrets
import time

NAME_PATTERN = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"
NAME_RULE = "1 to 63 lower-case letters, digits and hyphens, with a letter or digit at both ends"
TABLE_PATTERN = r"^([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\.)?[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"
DEFAULT_NAMESPACE = "default"
TABLE_RULE = f"a name, or namespace.name where the namespace is not {DEFAULT_NAMESPACE}; each part is {NAME_RULE}"
PARTITION_PATTERN = r"^[A-Za-z0-9_=:+@,-][A-Za-z0-9_=:+@,.-]{0,199}$"
PARTITION_RULE = "1 to 200 letters, digits and _=:+@,.- with no dot at the start, such as ds=2026-11-22"
READ_PATTERN = f"{TABLE_PATTERN[:-1]}(/{PARTITION_PATTERN[1:-1]})?$"
PARTITION_READ_PATTERN = f"{TABLE_PATTERN[:-1]}/{PARTITION_PATTERN[1:]}"
DATACENTER_PATTERN = f"{NAME_PATTERN[:-1]}/{NAME_PATTERN[1:]}"
READ_RULE = f"{TABLE_RULE}; one partition of it is table/partition, where the partition is {PARTITION_RULE}"
_NAME = re.compile(NAME_PATTERN)
_TABLE = re.compile(TABLE_PATTERN)
_PARTITION = re.compile(PARTITION_PATTERN)
INSTANCE_PREFIX = "in-"
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"


def is_name(text: str) -> bool:
    """Whether `text` may name a tenant, workload, job, region, datacenter, cluster or machine (`NAME_RULE`)."""
    return _NAME.fullmatch(text) is not None


def is_table_name(text: str) -> bool:
    """Whether `text` may name a table (`TABLE_RULE`). A name without a namespace is one of the default namespace."""
    return _TABLE.fullmatch(text) is not None and not text.startswith(f"{DEFAULT_NAMESPACE}.")


def is_partition_name(text: str) -> bool:
    """Whether `text` may name a partition of a table (`PARTITION_RULE`)."""
    return _PARTITION.fullmatch(text) is not None


def is_read(text: str) -> bool:
    """Whether `text` may name what a run read: a table, or `table/partition` (`READ_RULE`)."""
    table, partition = split_read(text)
    return is_table_name(table) and (partition is None or is_partition_name(partition))


def split_read(text: str) -> tuple[str, str | None]:
    """The table of what a run read, and its partition; None: it read all of the table. No name has a slash."""
    table, slash, partition = text.partition("/")
    return table, partition if slash else None


def partition_read(table: str, partition: str) -> str:
    """What a run names that read one partition: `table/partition`."""
    return f"{table}/{partition}"


def _base32(number: int, digits: int) -> str:
    out = []
    for _ in range(digits):
        number, rest = divmod(number, 32)
        out.append(_ALPHABET[rest])
    return "".join(reversed(out))


def new_workload_id() -> str:
    """A workload id: `wl-`, 9 digits of time (milliseconds) and 7 of chance, so that ids sort by age."""
    return f"wl-{_base32(time.time_ns() // 1_000_000, 9)}{_base32(secrets.randbits(35), 7)}"


def new_instance_id() -> str:
    """The id of an instance: `in-` and the same; a name, too, since its machine is named by it."""
    return f"{INSTANCE_PREFIX}{_base32(time.time_ns() // 1_000_000, 9)}{_base32(secrets.randbits(35), 7)}"


def machine_id(region: str, cluster: str, machine: str) -> str:
    """The id of a machine: `region/cluster/machine`."""
    return f"{region}/{cluster}/{machine}"


def workload_workflow_id(workload_id: str) -> str:
    """The Temporal workflow that holds a workload's life."""
    return f"workload/{workload_id}"


def machine_workflow_id(machine: str) -> str:
    """The Temporal workflow that holds a machine's registration."""
    return f"machine/{machine}"


def instance_workflow_id(instance: str) -> str:
    """The Temporal workflow that holds an instance's life."""
    return f"instance/{instance}"


def replica_workflow_id(table: str, region: str) -> str:
    """The Temporal workflow that copies a table to a region."""
    return f"replica/{table}/{region}"


def scrub_workflow_id(region: str) -> str:
    """The Temporal workflow that verifies a region's copies of tables, over and over."""
    return f"scrub/{region}"


NIGHT_SCHEDULE_ID = "tetris"
"""Temporal's schedule of the nightly placement of tables."""
NIGHT_WORKFLOW_ID = "tetris-night"
"""Temporal appends the time of the start: that is a night's id."""
CONTROL_QUEUE = "control"
SCHEDULER_WORKFLOW_ID = "scheduler"
HOUSEKEEPING_WORKFLOW_ID = "housekeeping"


def region_queue(region: str) -> str:
    """The Temporal task queue of a region's RMS processes."""
    return f"region/{region}"


def agent_queue(machine: str) -> str:
    """The Temporal task queue that one machine's agent polls."""
    return f"agent/{machine}"


def run_id(workload_id: str, attempt: int, job: str, task: int) -> str:
    """One task of one attempt: the key under which an agent finds what an earlier try started."""
    return f"{workload_id}.{attempt}.{job}.{task}"


def bucket_marker_key(region: str) -> str:
    """The object in a region's bucket by which its worker sees that the bucket answers and is the one that it was."""
    return f"regions/{region}/marker"


def checkpoint_prefix(workload_id: str) -> str:
    """Where a workload's checkpoints are in its region's bucket."""
    return f"checkpoints/{workload_id}/"


def log_prefix(workload_id: str, attempt: int, job: str, task: int) -> str:
    """Where a task's log segments are in its region's bucket."""
    return f"logs/{workload_id}/{attempt}/{job}/{task}/"


def task_log(workload_id: str, attempt: int, task: str) -> str:
    """`log_prefix` of a task that is named `job/task`."""
    job, _, number = task.partition("/")
    return log_prefix(workload_id, attempt, job, int(number))


def launch_key(workload_id: str, attempt: int, sha256: str) -> str:
    """Where an attempt's launch description with this SHA-256 (hexadecimal) is in its region's bucket."""
    return f"launches/{workload_id}/{attempt}/{sha256}.json"


def table_prefix(table: str) -> str:
    """Where a table's objects are in a region's bucket. No table's are among another's: a dot is in no plain name."""
    return f"tables/{table}/"


def partition_prefix(table: str, partition: str) -> str:
    """Where a partition's objects are in a region's bucket, if the table has more than the one that is all of it."""
    return f"{table_prefix(table)}{partition}/"


def night_prefix(night: str) -> str:
    """Where what a night decided on is kept: its instance, plan, replicas and moves."""
    return f"tetris/nights/{night}/"


def archive_key(sha256: str) -> str:
    """Where an uploaded working directory is in a region's bucket."""
    return f"archives/{sha256}.tar.gz"
