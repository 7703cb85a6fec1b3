"""Attacks on other processes by their numbers, on what the kernel tells of the whole machine, and on files."""

import contextlib
import ctypes
import fcntl
import http.client
import os
import resource
import shutil
import signal
import socket
import stat
import struct
import subprocess
import urllib.request
from collections.abc import Callable
from pathlib import Path

from tests.isolation.attack_results import Targets, check, some, succeeding

_HERE = -100
_USUAL = {socket.AF_UNIX, socket.AF_INET, socket.AF_INET6, socket.AF_NETLINK}
_LAST_FAMILY = 46
_PARTS = ("", "/why", "/attempts", "/progress", "/allocations", "/outputs", "/logs", "/events")
_HEADER_BYTES = 16
_libc = ctypes.CDLL(None, use_errno=True)


def socket_families(targets: Targets) -> str:
    """Makes sockets of families that programs rarely use: of buses, radios, clusters, tunnels and cryptography."""
    calls: dict[str, Callable[[], object]] = {
        f"family {family} type {kind}": lambda family=family, kind=kind: socket.socket(family, kind).close()
        for family in range(1, _LAST_FAMILY)
        for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_RAW, socket.SOCK_SEQPACKET)
        if family not in _USUAL
    }
    pair = {f"pair of {family}": lambda family=family: socket.socketpair(family) for family in (38, 40, 43)}
    return some(succeeding(calls | pair), f"{len(calls)} kinds")


def events_of_the_kernel(targets: Targets) -> str:
    """Subscribes to starts and ends of all processes, to events of devices and to the audit log, by netlink."""

    def processes() -> None:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, 11) as netlink:
            netlink.bind((0, 1))
            body = struct.pack("=IIIIHHI", 1, 1, 1, 0, 4, 0, 1)
            netlink.send(struct.pack("=IHHII", _HEADER_BYTES + len(body), 3, 0, 0, os.getpid()) + body)
            netlink.settimeout(2.0)
            assert netlink.recv(4096)
            netlink.recv(4096)  # The first message is the answer, which has an error code in any case.
            netlink.recv(4096)

    def multicast(protocol: int, group: int) -> None:
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol) as netlink:
            netlink.setsockopt(270, 1, group)

    calls: dict[str, Callable[[], object]] = {
        "processes": processes,
        "audit": lambda: multicast(9, 1),
    }
    return some(succeeding(calls), "none")


def watches(targets: Targets) -> str:
    """Watches folders of another tenant by inotify and fanotify."""
    calls: dict[str, Callable[[], object]] = {}
    for path in (targets["victim_folder"], targets["victim_checkpoint"]):
        name = os.fsencode(path)
        calls[f"inotify {path}"] = lambda name=name: check(
            _libc.inotify_add_watch(check(_libc.inotify_init1(0)), name, 0x100)
        )
        calls[f"fanotify {path}"] = lambda name=name: check(
            _libc.syscall(301, check(_libc.syscall(300, 0x200, 0)), 1, ctypes.c_uint64(0x100), _HERE, name)
        )
    return some(succeeding(calls), "none")


def others_by_number(targets: Targets) -> str:
    """Compares, slows, moves, limits, signals and debugs another tenant's task."""
    pid, place = targets["victim"], struct.pack("QQ", 1 << 22, 4096)
    about = ctypes.create_string_buffer(struct.pack("iii", signal.SIGCONT, 0, -1), 128)
    calls: dict[str, Callable[[], object]] = {
        "kcmp": lambda: check(_libc.syscall(312, os.getpid(), pid, 0, 0, 0)),
        "affinity": lambda: os.sched_setaffinity(pid, os.sched_getaffinity(0)),
        "priority": lambda: os.setpriority(os.PRIO_PROCESS, pid, 10),
        "io priority": lambda: check(_libc.syscall(251, 1, pid, 3 << 13)),
        "scheduling": lambda: os.sched_setscheduler(pid, os.SCHED_BATCH, os.sched_param(0)),
        "signal with a value": lambda: check(_libc.syscall(129, pid, signal.SIGCONT, about)),
        "signal by pidfd": lambda: signal.pidfd_send_signal(os.pidfd_open(pid), signal.SIGCONT),
        "signal to its group": lambda: os.killpg(os.getpgid(pid), signal.SIGCONT),
        "pages": lambda: check(_libc.syscall(279, pid, 1, struct.pack("Q", 1 << 22), None, b"0000", 0)),
        "robust list": lambda: check(_libc.syscall(274, pid, b"0" * 8, b"0" * 8)),
        "advice": lambda: check(_libc.syscall(440, os.pidfd_open(pid), place, 1, 20, 0)),
        "seize": lambda: check(_libc.ptrace(0x4206, pid, None, None)),
        "system call": lambda: Path(f"/proc/{pid}/syscall").read_text(),
        "badness": lambda: Path(f"/proc/{pid}/oom_score_adj").write_text("1000"),
    }
    return some(succeeding(calls), f"{len(calls)} calls fail")


def clocks_and_names(targets: Targets) -> str:
    """Adjusts clocks, sets timers that wake the machine, and changes names of the machine."""
    calls: dict[str, Callable[[], object]] = {
        "adjtimex": lambda: check(_libc.adjtimex(ctypes.create_string_buffer(struct.pack("I", 1), 256))),
        "clock_adjtime": lambda: check(_libc.syscall(305, 0, ctypes.create_string_buffer(struct.pack("I", 1), 256))),
        "time zone": lambda: check(_libc.settimeofday(None, struct.pack("ii", 60, 0))),
        "domain name": lambda: check(_libc.setdomainname(b"intruder", 8)),
        "alarm": lambda: check(_libc.syscall(283, 9, 0)),
        "swap": lambda: check(_libc.swapoff(b"/dev/vda")),
        "quota": lambda: check(_libc.syscall(179, 0x800002 << 8, b"/dev/vda", 0, 0)),
        "virtual terminal": lambda: check(_libc.vhangup()),
        "locked memory": lambda: (
            check(_libc.syscall(151, 1)) if _libc.syscall(149, 1 << 22, 1 << 30) == 0 else check(-1)
        ),
    }
    return some(succeeding(calls), f"{len(calls)} calls fail")


def inherited(targets: Targets) -> str:
    """Looks for open files and sockets, and for variables, that the agent has left it."""
    # Python's own descriptors are closed in a new program; those that this one got are not.
    shown = subprocess.run(["ls", "-l", "/proc/self/fd"], close_fds=False, capture_output=True, text=True, check=False)
    entries = [line.partition(" -> ")[::2] for line in shown.stdout.splitlines() if " -> " in line]
    found = [f"{name[-3:]}: {what}" for name, what in entries if int(name.split()[-1]) > 2 and "/proc/" not in what]
    found += [name for name in os.environ if name.startswith(("NOTIFY_SOCKET", "LISTEN_", "SSH_", "INVOCATION_ID"))]
    return some(found, "nothing")


def cgroups_of_others(targets: Targets) -> str:
    """Reads names and use of the cgroups of other tenants' tasks."""
    found = []
    for folder, names, _ in os.walk("/sys/fs/cgroup"):
        found += [f"{folder}/{name}" for name in names if targets["victim_workload"] in name]
    return some(found[:2], "none is visible")


def sockets_of_others(targets: Targets) -> str:
    """Lists ports and named sockets of all processes of the machine."""
    found = []
    for name in ("tcp", "tcp6"):
        lines = Path(f"/proc/net/{name}").read_text().splitlines()[1:]
        found += [line for line in lines if f":{targets['victim_port']:04X} " in line]
    found += [line for line in Path("/proc/net/unix").read_text().splitlines() if f"@{targets['shm']}" in line]
    return some(found[:2], "none")


def ports_that_others_use(targets: Targets) -> str:
    """Listens beside another tenant's task and the API on the same port, to get a part of their connections."""
    found = []
    for port in (targets["victim_port"], *targets["ports"]):
        for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
            for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET, ""), (socket.AF_INET6, "::")):
                with contextlib.suppress(OSError), socket.socket(family) as server:
                    server.setsockopt(socket.SOL_SOCKET, option, 1)
                    server.bind((host, port))
                    server.listen()
                    found.append(f"{host} {port} {option}")
    return some(found, "none")


def ports_of_later_tasks(targets: Targets) -> str:
    """Listens on the ports that the agent reserves for tasks, to get connections of clients of later ones."""
    found, own = [], int(os.environ["MASTER_PORT"])
    for port in (one for one in range(*targets["range"]) if one != own):
        with contextlib.suppress(OSError), socket.socket() as server:
            server.bind(("", port))
            server.listen()
            found.append(port)
    return some(found, "none")


def devices_in_its_checkpoints(targets: Targets) -> str:
    """Makes a device in its checkpoints. `tests/isolation/outside.py` leaves links there."""
    own = Path(os.environ["MIZZEN_CHECKPOINT_URI"].removeprefix("file://"))
    own.mkdir(parents=True, exist_ok=True)
    call: dict[str, Callable[[], object]] = {
        "a device file": lambda: os.mknod(own / "disk", 0o600 | stat.S_IFBLK, os.makedev(254, 0))
    }
    return some(succeeding(call), "none can be made")


def modes_that_outlast_it(targets: Targets) -> str:
    """Gives its files the set-user-id bit, capabilities and attributes, which programs outside could follow.

    It leaves programs with its user, `closed` in its checkpoints, and `opened` in a folder that it opens to everybody.
    The test runs them as another user of the machine.
    """
    found = []
    own = Path(os.environ["MIZZEN_CHECKPOINT_URI"].removeprefix("file://"))
    Path("left").mkdir()
    program = Path("left/opened")
    for path in (own / "closed", program):
        shutil.copyfile("/usr/bin/id", path)
        path.chmod(0o6755)
    for folder in (Path("left"), Path.cwd()):
        folder.chmod(0o777)
    calls: dict[str, Callable[[], object]] = {
        "capabilities": lambda: os.setxattr(
            program, "security.capability", struct.pack("<5I", 0x2000001, 1 << 21, 0, 0, 0)
        ),
        "trusted": lambda: os.setxattr(program, "trusted.overlay.opaque", b"y"),
        "immutable": lambda: fcntl.ioctl(os.open(program, os.O_RDONLY), 0x40086602, struct.pack("l", 0x10)),
        "owner": lambda: os.chown(program, 0, 0) if os.geteuid() else check(-1),
        "project": lambda: check(_libc.syscall(443, os.open(".", os.O_RDONLY), b"/", 0x800002 << 8, 0, 0)),
    }
    found += succeeding(calls)
    return some(found, "each fails")


def api_with_keys(targets: Targets) -> str:
    """Calls the API about another tenant, with a key of its own tenant and with all that its environment has."""
    victim, own = targets["victim_workload"], targets["key"]
    asked = [("GET", f"/v1/workloads/{victim}{part}") for part in _PARTS]
    asked += [("POST", f"/v1/workloads/{victim}/{act}") for act in ("hold", "preempt", "cancel", "sessions")]
    asked += [("GET", "/v1/tenants/victim/secrets"), ("PUT", "/v1/tenants/victim/secrets/planted"), ("GET", "/v1/keys")]
    found = [f"{method} {path}" for method, path in asked if _answer(targets, method, path, own) is not None]
    for path in ("/v1/workloads", "/v1/queue", "/v1/audit", "/v1/tenants", "/v1/costs"):
        if victim in (_answer(targets, "GET", path, own) or ""):
            found.append(f"{path} names {victim}")
        found += [
            f"{name}: {path}" for name, key in os.environ.items() if _answer(targets, "GET", path, key) is not None
        ]
    mine = _answer(targets, "GET", "/v1/workloads", own) or ""
    assert os.environ["MIZZEN_WORKLOAD"] in mine, "the key is valid, so it was refused for whose the workloads are"
    return some(found, f"{len(asked)} calls are refused")


def _answer(targets: Targets, method: str, path: str, key: str) -> str | None:
    """Returns the body of an answer of the API; None: the API refuses the call."""
    told = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    body = None if method == "GET" else b"{}"
    try:
        request = urllib.request.Request(targets["api"] + path, method=method, data=body, headers=told)
        with urllib.request.urlopen(request, timeout=10.0) as answer:
            return str(answer.read().decode())
    except (OSError, ValueError, http.client.HTTPException):
        return None


def core_dumps(targets: Targets) -> str:
    """Crashes, so that the kernel starts the machine's program for core dumps with data of the task."""
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_CORE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        os.kill(os.getpid(), signal.SIGSEGV)
    status = os.waitpid(pid, 0)[1]
    pattern = Path("/proc/sys/kernel/core_pattern").read_text()
    return some([pattern] if os.WCOREDUMP(status) and pattern.startswith("|") else [], f"no program: {pattern.strip()}")


ATTACKS: tuple[Callable[[Targets], str], ...] = (
    socket_families, events_of_the_kernel, watches, others_by_number, clocks_and_names, inherited, cgroups_of_others,
    sockets_of_others, ports_that_others_use, ports_of_later_tasks, devices_in_its_checkpoints, modes_that_outlast_it,
    core_dumps, api_with_keys,
)  # fmt: skip
