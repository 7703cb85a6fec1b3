"""Names and ids: their formats, and functions that derive ids from other ids."""

import hashlib
import re
import secrets
import time

NAME_PATTERN = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"
NAME_LENGTH = 63
"""Maximum number of characters of a name."""
NAME_RULE = "1 to 63 lower-case letters, digits and hyphens, with a letter or digit at both ends"
TABLE_PATTERN = r"^([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\.)?[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"
DEFAULT_NAMESPACE = "default"
TABLE_RULE = f"a name, or namespace.name where the namespace is not {DEFAULT_NAMESPACE}; each part is {NAME_RULE}"
PARTITION_PATTERN = r"^[A-Za-z0-9_=:+@,-][A-Za-z0-9_=:+@,.-]{0,199}$"
PARTITION_RULE = "1 to 200 letters, digits and _=:+@,.- with no dot at the start, such as ds=2026-11-22"
READ_PATTERN = f"{TABLE_PATTERN[:-1]}(/{PARTITION_PATTERN[1:-1]})?$"
PARTITION_READ_PATTERN = f"{TABLE_PATTERN[:-1]}/{PARTITION_PATTERN[1:]}"
DATACENTER_PATTERN = f"{NAME_PATTERN[:-1]}/{NAME_PATTERN[1:]}"
MACHINE_PATTERN = f"{NAME_PATTERN[:-1]}/{NAME_PATTERN[1:-1]}/{NAME_PATTERN[1:]}"
MACHINE_RULE = f"REGION/CLUSTER/MACHINE, such as east/a/node-1, where each of the three is {NAME_RULE}"
RUN_PATTERN = r"^[A-Za-z0-9_-]{1,63}\.[0-9]{1,9}$"
RUN_RULE = "WORKLOAD.ATTEMPT, such as wl-0k2m4.3, where ATTEMPT has at most 9 digits"
READ_RULE = f"{TABLE_RULE}; one partition of it is table/partition, where the partition is {PARTITION_RULE}"
RULES = {NAME_PATTERN: NAME_RULE, TABLE_PATTERN: TABLE_RULE, MACHINE_PATTERN: MACHINE_RULE, READ_PATTERN: READ_RULE}
"""What each pattern requires, for error messages."""
_NAME = re.compile(NAME_PATTERN)
_TABLE = re.compile(TABLE_PATTERN)
_PARTITION = re.compile(PARTITION_PATTERN)
_RUN = re.compile(RUN_PATTERN)
_ELEMENT = re.compile(r"(wl-[0-9a-z]{16})-(0|[1-9][0-9]{0,8})")
_RUNNER = re.compile(r"wl-[0-9a-z]+-r[0-9]+")
INSTANCE_PREFIX = "in-"
SESSION_PREFIX = "session-"
_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"


def is_name(text: str) -> bool:
    """Returns whether `text` is a valid name of a tenant, workload, job, region, datacenter, cluster or machine."""
    return _NAME.fullmatch(text) is not None


def joined(*parts: str) -> str:
    """Returns a valid name that contains the parts, and hyphens for other characters.

    A name that would be too long ends with a digest instead, so that different parts have different names.
    """
    text = "-".join(parts)
    name = re.sub("[^a-z0-9]", "-", text.lower()).strip("-")
    if len(name) <= NAME_LENGTH:
        return name
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{name[: NAME_LENGTH - len(digest) - 1].rstrip('-')}-{digest}"


def is_table_name(text: str) -> bool:
    """Returns whether `text` is a valid table name (`TABLE_RULE`). Without a namespace, the default one is meant."""
    return _TABLE.fullmatch(text) is not None and not text.startswith(f"{DEFAULT_NAMESPACE}.")


def is_partition_name(text: str) -> bool:
    """Returns whether `text` is a valid name of a partition of a table (`PARTITION_RULE`)."""
    return _PARTITION.fullmatch(text) is not None


def is_run(text: str) -> bool:
    """Returns whether `text` names an attempt of a workload (`RUN_RULE`)."""
    return _RUN.fullmatch(text) is not None


def is_read(text: str) -> bool:
    """Returns whether `text` is a valid name of data that a run read: `table` or `table/partition` (`READ_RULE`)."""
    table, partition = split_read(text)
    return is_table_name(table) and (partition is None or is_partition_name(partition))


def split_read(text: str) -> tuple[str, str | None]:
    """Splits `table` or `table/partition`, the name of data that a run read. Partition None: the whole table.

    Names of tables and partitions contain no slash.
    """
    table, slash, partition = text.partition("/")
    return table, partition if slash else None


def partition_read(table: str, partition: str) -> str:
    """Returns the name of one partition of a table: `table/partition`."""
    return f"{table}/{partition}"


def _base32(number: int, digits: int) -> str:
    out = []
    for _ in range(digits):
        number, rest = divmod(number, 32)
        out.append(_ALPHABET[rest])
    return "".join(reversed(out))


def new_workload_id() -> str:
    """Returns a new workload id: `wl-`, 9 digits of the time in milliseconds and 7 random digits, all in base 32.

    Ids sort by age.
    """
    return f"wl-{_base32(time.time_ns() // 1_000_000, 9)}{_base32(secrets.randbits(35), 7)}"


def element_id(array: str, index: int) -> str:
    """Returns the id of an element of an array."""
    return f"{array}-{index}"


def runner_id(array: str, number: int) -> str:
    """Returns the id of a runner of an array."""
    return f"{array}-r{number}"


def is_runner(workload_id: str) -> bool:
    """Returns whether an id is that of a runner of an array."""
    return _RUNNER.fullmatch(workload_id) is not None


def array_of(element: str) -> str:
    """Returns the id of the array of an element or a runner."""
    return element.rpartition("-")[0]


def split_element(workload_id: str) -> tuple[str, int] | None:
    """Returns the array's id and the index in the id of an element; None: it is not one."""
    found = _ELEMENT.fullmatch(workload_id)
    return None if found is None else (found[1], int(found[2]))


def new_instance_id() -> str:
    """Returns a new instance id: `in-` and the digits of a workload id. It is a valid machine name (`NAME_RULE`).

    The instance's machine has this name.
    """
    return f"{INSTANCE_PREFIX}{_base32(time.time_ns() // 1_000_000, 9)}{_base32(secrets.randbits(35), 7)}"


def new_service_id() -> str:
    """Returns a new service id: `sv-` and the digits of a workload id."""
    return f"sv-{_base32(time.time_ns() // 1_000_000, 9)}{_base32(secrets.randbits(35), 7)}"


def machine_id(region: str, cluster: str, machine: str) -> str:
    """Returns the id of a machine: `region/cluster/machine`."""
    return f"{region}/{cluster}/{machine}"


def workload_workflow_id(workload_id: str) -> str:
    """Returns the id of the Temporal workflow that runs a workload."""
    return f"workload/{workload_id}"


def bundle_workflow_id(message: int) -> str:
    """Returns the id of the Temporal workflow of a bundle, by the first award message that it handles."""
    return f"bundle/{message}"


def machine_workflow_id(machine: str) -> str:
    """Returns the id of the Temporal workflow that manages a machine's registration."""
    return f"machine/{machine}"


def instance_workflow_id(instance: str) -> str:
    """Returns the id of the Temporal workflow that manages an instance from its launch to its end."""
    return f"instance/{instance}"


def service_workflow_id(service: str) -> str:
    """Returns the id of the Temporal workflow that keeps a service's replicas."""
    return f"service/{service}"


def replica_workflow_id(table: str, region: str) -> str:
    """Returns the id of the Temporal workflow that copies a table to a region."""
    return f"replica/{table}/{region}"


def scrub_workflow_id(region: str) -> str:
    """Returns the id of the Temporal workflow that continuously verifies a region's copies of tables."""
    return f"scrub/{region}"


PLACEMENT_SCHEDULE_ID = "tetris"
"""Id of the Temporal schedule of the nightly placement of tables."""
PLACEMENT_RUN_WORKFLOW_ID = "placement-run"
"""Id of the workflow of a placement run. Temporal appends the start time; the result is the placement run's id."""
CONTROL_QUEUE = "control"
SCHEDULER_WORKFLOW_ID = "scheduler"
HOUSEKEEPING_WORKFLOW_ID = "housekeeping"


def region_queue(region: str) -> str:
    """Returns the Temporal task queue of a region's RMS processes."""
    return f"region/{region}"


def agent_queue(machine: str) -> str:
    """Returns the Temporal task queue that one machine's agent polls."""
    return f"agent/{machine}"


def machine_of_queue(queue: str) -> str:
    """Returns the machine whose agent polls a task queue, the reverse of `agent_queue`."""
    return queue.removeprefix("agent/")


def run_id(workload_id: str, attempt: int, job: str, task: int) -> str:
    """Returns the id of one task of one attempt. With it an agent finds a task that an earlier activity try started."""
    return f"{workload_id}.{attempt}.{job}.{task}"


def bucket_marker_key(region: str) -> str:
    """Returns the key of the object by which a region's worker checks that the bucket is reachable and the same one."""
    return f"regions/{region}/marker"


def checkpoint_prefix(workload_id: str) -> str:
    """Returns the prefix of a workload's checkpoints in the store of its cluster or the bucket of its region."""
    return f"checkpoints/{workload_id}/"


def checkpoint_marker_key(workload_id: str) -> str:
    """Returns the key of the object that shows that a cluster's store is the one with the workload's checkpoints."""
    return f"{checkpoint_prefix(workload_id)}marker"


def log_prefix(workload_id: str, attempt: int, job: str, task: int) -> str:
    """Returns the prefix of a task's log segments in its region's bucket."""
    return f"logs/{workload_id}/{attempt}/{job}/{task}/"


def task_log(workload_id: str, attempt: int, task: str) -> str:
    """Returns the `log_prefix` of a task given as `job/task`."""
    job, _, number = task.rpartition("/")
    return log_prefix(workload_id, attempt, job, int(number))


def outputs_prefix(workload_id: str) -> str:
    """Returns the prefix of all objects of a workload's outputs in the bucket of a region."""
    return f"outputs/{workload_id}/"


def output_manifests_prefix(workload_id: str) -> str:
    """Returns the prefix of the manifests of a workload's outputs (`domain.output_manifest`)."""
    return f"{outputs_prefix(workload_id)}manifests/"


def output_manifest_key(workload_id: str, attempt: int, job: str, task: int, output: str) -> str:
    """Returns the key of the manifest of one output of one task of an attempt."""
    return f"{output_manifests_prefix(workload_id)}{job}/{task}/{output}/{attempt}.json"


def output_part_key(workload_id: str, attempt: int, job: str, task: int, output: str, number: int) -> str:
    """Returns the key of a part, counted from 0, of one output of one task of an attempt."""
    return f"{outputs_prefix(workload_id)}parts/{job}/{task}/{output}/{attempt}/{number:06d}"


def launch_key(workload_id: str, attempt: int, sha256: str) -> str:
    """Returns the key of an attempt's launch description, with this SHA-256 (hex), in its region's bucket."""
    return f"launches/{workload_id}/{attempt}/{sha256}.json"


def table_prefix(table: str) -> str:
    """Returns the prefix of a table's objects in a region's bucket.

    No prefix contains that of another table, because table names contain no slash.
    """
    return f"tables/{table}/"


def partition_prefix(table: str, partition: str) -> str:
    """Returns the prefix of a partition's objects in a region's bucket, for a table with named partitions."""
    return f"{table_prefix(table)}{partition}/"


def placement_run_prefix(placement_run: str) -> str:
    """Returns the prefix of a placement run's stored documents: its instance, plan, replicas and moves."""
    return f"tetris/placement-runs/{placement_run}/"


def archive_key(sha256: str) -> str:
    """Returns the key of an uploaded working directory in a region's bucket."""
    return f"archives/{sha256}.tar.gz"
