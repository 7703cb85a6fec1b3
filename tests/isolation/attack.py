"""Attacks that a tenant's task runs: `python -m tests.isolation.attack TARGETS` prints a line of JSON for each.

The line says what the attack got, or what has stopped it.

TARGETS is a JSON object: names of attacks that are `left_out`, `data_dir` of the installation, its `api` (a URL), all
TCP `ports` on which it listens, and `victim`, the pid of another tenant's task, with its `victim_workload`, the folder
`victim_folder`, the checkpoint `victim_checkpoint`, and what it shares (`tests/isolation/victim.py`).
"""

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import socket
import stat
import struct
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path

from tests.isolation import attack_kernel, attack_more
from tests.isolation.attack_results import Blocked, Targets, check, fork_with, readable, some, succeeding

_ANSWERS_S = 3.0
_PTRACE_ATTACH = 16
_libc = ctypes.CDLL(None, use_errno=True)


def temporal_by_port(targets: Targets) -> str:
    """Connects to each TCP port of the installation as a client of Temporal, without credentials."""
    from temporalio.client import Client

    async def answering() -> list[int]:
        found = []
        for port in targets["ports"]:
            try:
                async with asyncio.timeout(_ANSWERS_S):
                    await Client.connect(f"127.0.0.1:{port}")
                found.append(port)
            except (RuntimeError, TimeoutError):
                continue
        return found

    return some(asyncio.run(answering()), f"none of {len(targets['ports'])} ports answers")


def temporal_by_socket(targets: Targets) -> str:
    """Connects to the Unix sockets of Temporal, of its UI and of Postgres."""
    names = ("run/temporal.sock", "run/temporal-ui.sock", "postgres/data/.s.PGSQL.5432")
    found, errors = [], []
    for name in names:
        with socket.socket(socket.AF_UNIX) as client:
            try:
                client.connect(str(Path(targets["data_dir"]) / name))
                found.append(name)
            except OSError as error:
                errors.append(f"{name}: {error.strerror}")
    return some(found, "; ".join(errors))


def any_socket(targets: Targets) -> str:
    """Connects to the Unix sockets of mizzen and of Postgres whose paths the kernel lists."""
    paths = {line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()[1:] if len(line.split()) > 7}
    found = []
    for path in paths:
        if targets["data_dir"] in path or "PGSQL" in path or "mizzen" in path:
            with socket.socket(socket.AF_UNIX) as client:
                try:
                    client.connect("\0" + path[1:] if path.startswith("@") else path)
                    found.append(path)
                except OSError:
                    continue
    return some(found, f"{len(paths)} sockets")


def postgres_by_port(targets: Targets) -> str:
    """Asks each TCP port of the installation for an encrypted connection of Postgres's protocol."""
    found = []
    for port in targets["ports"]:
        try:
            with socket.create_connection(("127.0.0.1", port), _ANSWERS_S) as client:
                client.settimeout(_ANSWERS_S)
                client.sendall(bytes.fromhex("0000000804d2162f"))
                if client.recv(1) in (b"S", b"N"):
                    found.append(port)
        except OSError:
            continue
    return some(found, "no port answers")


def keys_and_settings(targets: Targets) -> str:
    """Reads the keys of the operator and of all machines, the master key and the settings."""
    names = ("operator.key", "master.key", "run/machine-keys.json", "run/settings.yaml", "run/agents.yaml")
    return readable([Path(targets["data_dir"]) / name for name in (*names, "postgres/password", "temporal.db")])


def listing_of_the_data_folder(targets: Targets) -> str:
    """Lists the data folder, in which a task sees at most the folders on the way to its own, and the stack's folder."""
    found = []
    for folder in (targets["data_dir"], f"{targets['data_dir']}/run"):
        try:
            found += [one.name for one in Path(folder).iterdir() if one.name not in ("machines", "buckets")]
        except OSError:
            continue
    return some(found, "nothing else can be listed")


def api_without_a_key(targets: Targets) -> str:
    """Calls the API and Temporal's UI without a key."""
    found = []
    for path in ("/v1/workloads", "/v1/secrets", "/temporal/", "/temporal/api/v1/namespaces", "/metrics"):
        try:
            with urllib.request.urlopen(targets["api"] + path, timeout=_ANSWERS_S) as answer:
                found.append(f"{path}: {answer.status}")
        except OSError:
            continue
    return some([one for one in found if not one.startswith("/metrics")], "no path answers")


def environment_of_a_process(targets: Targets) -> str:
    """Reads the environment and the memory of another tenant's task, which contain its secrets."""
    return readable([Path(f"/proc/{targets['victim']}/{name}") for name in ("environ", "mem", "maps", "cwd/.")])


def signals(targets: Targets) -> str:
    """Stops and kills another tenant's task."""
    try:
        os.kill(targets["victim"], signal.SIGCONT)
    except OSError as error:
        raise Blocked(str(error)) from None
    return "the signal was sent"


def ptrace(targets: Targets) -> str:
    """Attaches to another tenant's task as a debugger."""
    if _libc.ptrace(_PTRACE_ATTACH, targets["victim"], None, None) != 0:
        raise Blocked(os.strerror(ctypes.get_errno()))
    return "attached"


def folder_of_another_tenant(targets: Targets) -> str:
    """Reads the working folder of another tenant's task."""
    return readable([Path(targets["victim_folder"]), Path(targets["victim_folder"]) / "work" / "private.txt"])


def checkpoints_of_another_tenant(targets: Targets) -> str:
    """Lists and changes the checkpoints of another tenant in a bucket that is a local folder."""
    folder = Path(targets["victim_checkpoint"])
    try:
        found = [str(path) for path in folder.rglob("*")]
        (folder / "intruder").write_text("x")
    except OSError as error:
        raise Blocked(str(error)) from None
    return f"{found}, and a file was written"


def processes(targets: Targets) -> str:
    """Lists processes that are not its own, with their command lines."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with contextlib.suppress(OSError):
                command = (folder / "cmdline").read_bytes()
                if targets["victim_workload"].encode() in command or b"mizzen up" in command:
                    found.append(command.decode())
    return some(found, "no command line of others")


def shared_memory(targets: Targets) -> str:
    """Reads another tenant's POSIX and System V shared memory, both of which every user may read."""
    found = []
    with contextlib.suppress(OSError):
        found.append(Path(f"/dev/shm/{targets['shm']}").read_text())
    segment = _libc.shmget(targets["sysv"], 0, 0)
    if segment >= 0:
        found.append(f"segment {segment}")
    return some(found, "neither exists")


def temporary_files(targets: Targets) -> str:
    """Reads another tenant's file in /tmp that every user may read."""
    return readable([Path("/tmp") / targets["shm"]])


def port_of_another_tenant(targets: Targets) -> str:
    """Connects to a port of another tenant's task on loopback."""
    try:
        with socket.create_connection(("127.0.0.1", targets["victim_port"]), _ANSWERS_S) as client:
            return client.recv(100).decode()
    except OSError as error:
        raise Blocked(str(error)) from None


def abstract_socket(targets: Targets) -> str:
    """Connects to another tenant's abstract socket, which has no file and no owner."""
    with socket.socket(socket.AF_UNIX) as client:
        try:
            client.connect("\0" + targets["shm"])
            return client.recv(100).decode()
        except OSError as error:
            raise Blocked(str(error)) from None


def tables_logs_and_launches(targets: Targets) -> str:
    """Reads logs, launch descriptions, outputs and archives of all tenants in a bucket that is a local folder."""
    found = []
    for bucket in (Path(targets["data_dir"]) / "buckets").glob("*"):
        for name in ("logs", "launches", "outputs", "archives", "tetris"):
            with contextlib.suppress(OSError):
                found += [str(path) for path in (bucket / name).rglob("*") if path.is_file()]
    return some(found, "no file can be listed")


def homes(targets: Targets) -> str:
    """Lists homes of users of the machine. Python may be in one: what leads to it is not counted."""
    found, known = [], (sys.prefix, sys.base_prefix, *sys.path)
    for home in (Path("/root"), *Path("/home").glob("*")):
        with contextlib.suppress(OSError):
            paths = (str(path) for path in home.iterdir())
            found += [path for path in paths if not any(one.startswith(path) for one in known)]
    return some(found, "nothing can be listed")


def change_the_system(targets: Targets) -> str:
    """Creates files in folders of the system, and beside its working directory."""
    found = []
    for folder in ("/", "/usr", "/usr/bin", "/etc", "/opt", "/sys", "/dev", "/sys/fs/cgroup", Path.cwd().parent):
        with contextlib.suppress(OSError):
            (Path(folder) / "intruder").write_text("x")
            found.append(str(folder))
    return some(found, "no folder can be changed")


def kernel_settings(targets: Targets) -> str:
    """Changes settings of the kernel through /proc and /sys."""
    found = []
    for name in (
        "/proc/sys/kernel/core_pattern",
        "/proc/sysrq-trigger",
        "/proc/sys/vm/drop_caches",
        "/sys/power/state",
    ):
        with contextlib.suppress(OSError), open(name, "r+b"):
            found.append(name)
    return some(found, "none can be opened")


def limits_of_its_cgroup(targets: Targets) -> str:
    """Raises its own limits, or leaves its cgroup."""
    found = []
    for folder, _, names in os.walk("/sys/fs/cgroup"):
        for name in {"cgroup.procs", "memory.limit_in_bytes", "memory.max", "pids.max"} & set(names):
            with contextlib.suppress(OSError), open(f"{folder}/{name}", "r+b"):
                found.append(f"{folder}/{name}")
    return some(found[:3], "no file can be opened")


def devices(targets: Targets) -> str:
    """Opens disks, memory and the kernel's log, and makes a device."""
    found = []
    for path in (*Path("/dev").glob("[svx]d*"), *Path("/dev").glob("nvme*"), *map(Path, ("/dev/mem", "/dev/kmsg"))):
        with contextlib.suppress(OSError), path.open("rb"):
            found.append(str(path))
    with contextlib.suppress(OSError):
        os.mknod("disk", 0o600 | stat.S_IFBLK, os.makedev(254, 0))
        found.append("mknod")
    return some(found, "none can be opened")


def privileges(targets: Targets) -> str:
    """Becomes root by set-user-id programs, which a task with no_new_privs cannot use."""
    if "NoNewPrivs:\t1" in Path("/proc/self/status").read_text():
        raise Blocked("no_new_privs")
    return "set-user-id programs have an effect"


def capabilities(targets: Targets) -> str:
    """Uses capabilities: changes the user, the host name, the clock, the root folder, mounts, raw sockets."""
    calls: dict[str, Callable[[], object]] = {
        "setuid": lambda: os.setuid(0),
        "sethostname": lambda: socket.sethostname("intruder"),
        "clock": lambda: time.clock_settime(time.CLOCK_REALTIME, time.time()),
        "chroot": lambda: os.chroot("."),
        "mount": lambda: check(_libc.mount(b"none", b"/tmp", b"tmpfs", 0, None)),
        "raw socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1).close(),
        "packet socket": lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW).close(),
        "priority": lambda: os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, 0) - 1),
        "real time": lambda: os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1)),
        "reboot": lambda: check(_libc.reboot(0)),
    }
    return some(succeeding(calls), f"{len(calls)} calls fail")


def namespaces(targets: Targets) -> str:
    """Makes a user namespace, in which it would have all capabilities, by each of the three calls, and joins others."""
    new_user = 0x10000000
    calls: dict[str, Callable[[], object]] = {
        "unshare": lambda: check(_libc.unshare(new_user)),
        "clone": lambda: check(fork_with(_libc.syscall(56, new_user | signal.SIGCHLD, 0, 0, 0, 0))),
        "clone3": lambda: check(
            fork_with(_libc.syscall(435, struct.pack("<11Q", new_user, 0, 0, 0, signal.SIGCHLD, *[0] * 6), 88))
        ),
        "setns": lambda: check(_libc.setns(os.open("/proc/1/ns/mnt", os.O_RDONLY), 0)),
    }
    return some(succeeding(calls), "each fails")


def kernel_interfaces(targets: Targets) -> str:
    """Uses keyrings, AF_VSOCK, eBPF, performance events, io_uring, page faults in user space and the kernel's log."""
    calls: dict[str, Callable[[], object]] = {
        "add_key": lambda: check(_libc.syscall(248, b"user", b"intruder", b"x", 1, -3)),
        "keyctl": lambda: check(_libc.syscall(250, 0, -4, 0)),
        "vsock": lambda: socket.socket(40, socket.SOCK_STREAM).close(),
        "bpf": lambda: check(_libc.syscall(321, 0, struct.pack("<IIIII", 1, 4, 4, 1, 0), 20)),
        "perf_event_open": lambda: check(_libc.syscall(298, struct.pack("<II104x", 1, 112), 0, -1, -1, 0)),
        "io_uring": lambda: check(_libc.syscall(425, 4, ctypes.create_string_buffer(120))),
        "userfaultfd": lambda: check(_libc.syscall(323, 1)),
        "syslog": lambda: check(_libc.syscall(103, 3, ctypes.create_string_buffer(100), 100)),
    }
    return some(succeeding(calls), "each fails")


def its_supervisors(targets: Targets) -> str:
    """Looks into the first process that it sees, and into its shim."""
    found = []
    for name, pid in (("first", 1), ("shim", attack_kernel.shim())):
        for file in ("root/.", "cwd/.", "exe", "mem", "maps", "environ", "fd"):
            with contextlib.suppress(OSError):
                os.close(os.open(f"/proc/{pid}/{file}", os.O_RDONLY))
                found.append(f"{name}: {file}")
    return some(found, "neither can be read")


def fork_bomb(targets: Targets) -> str:
    """Starts processes until the kernel refuses; the limit is below two hundred."""
    children = []
    try:
        while len(children) < 400:
            pid = os.fork()
            if pid == 0:
                time.sleep(60)
                os._exit(0)
            children.append(pid)
    except OSError as error:
        raise Blocked(f"{len(children)} processes: {error}") from None
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    return f"{len(children)} processes"


def memory(targets: Targets) -> str:
    """Takes 1 GiB of memory, in a child; the task asked for 512 MiB."""
    pid = os.fork()
    if pid == 0:
        _first_to_be_killed()
        block = bytearray(1 << 30)
        os._exit(len(block) < 1)
    status = os.waitpid(pid, 0)[1]
    if os.WIFSIGNALED(status):
        raise Blocked(f"signal {os.WTERMSIG(status)}")
    return "1 GiB"


def shared_memory_without_limit(targets: Targets) -> str:
    """Fills /dev/shm beyond the memory of the task, in a child."""
    pid = os.fork()
    if pid == 0:
        _first_to_be_killed()
        try:
            with open("/dev/shm/much", "wb") as file:
                for _ in range(1024):
                    file.write(bytes(1 << 20))
        except OSError:
            os._exit(1)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    Path("/dev/shm/much").unlink(missing_ok=True)
    if status != 0:
        raise Blocked(f"status {status}")
    return "1 GiB"


def report_that_is_a_link(targets: Targets) -> str:
    """Replaces its report by a link to a report of root. The test looks at what the agent has read from it."""
    report = Path(os.environ["MIZZEN_REPORT"])
    report.unlink(missing_ok=True)
    report.symlink_to(targets["report"])
    time.sleep(3)
    raise Blocked("the link stays until the end")


def _first_to_be_killed() -> None:
    """Of the processes in the task's cgroup, if its memory is used up."""
    Path("/proc/self/oom_score_adj").write_text("1000")


ATTACKS: tuple[Callable[[Targets], str], ...] = (
    temporal_by_port, temporal_by_socket, any_socket, postgres_by_port, keys_and_settings, listing_of_the_data_folder,
    api_without_a_key, environment_of_a_process, signals, ptrace, folder_of_another_tenant,
    checkpoints_of_another_tenant, processes, shared_memory, temporary_files, port_of_another_tenant, abstract_socket,
    tables_logs_and_launches, homes, change_the_system, kernel_settings, limits_of_its_cgroup, devices, privileges,
    capabilities, namespaces, kernel_interfaces, its_supervisors, fork_bomb, memory, shared_memory_without_limit,
    report_that_is_a_link, *attack_more.ATTACKS, *attack_kernel.ATTACKS,
)  # fmt: skip


def main() -> None:
    """Runs all attacks."""
    targets = json.loads(Path(sys.argv[1]).read_text())
    for attack in (one for one in ATTACKS if one.__name__ not in targets["left_out"]):
        try:
            line = {"attack": attack.__name__, "got": attack(targets)}
        except Blocked as error:
            line = {"attack": attack.__name__, "blocked": str(error)}
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
