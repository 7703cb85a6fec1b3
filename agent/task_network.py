"""A separate network for the tasks in a sandbox, which is reachable only through declared ports of the machine.

It has a loopback interface, and one that is served by slirp4netns, one process for each sandbox. This process makes the
tasks' connections to other machines as its own connections, and accepts connections to the declared ports. Nothing on
the machine's loopback interface can be reached. slirp4netns ends with the sandbox. The sandbox's folder contains

    network.sock     its socket for commands
    network.log      its messages
    network.cgroup   path of its cgroup, if it has one
    resolv.conf      `/etc/resolv.conf` of the tasks

Uses the standard library only, because the shim imports this module.
"""

import ctypes
import errno
import json
import os
import shutil
import struct
import subprocess
from collections.abc import Iterable, Sequence
from typing import Any

from agent.cgroups import remove_cgroup

RESOLV_CONF = "resolv.conf"
_SOCKET, _CGROUP, _LOG = "network.sock", "network.cgroup", "network.log"
_ADDRESS, _RESOLVER = "10.0.2.100", "10.0.2.3"
"""Addresses of the tasks and of the resolver in slirp4netns's network."""
_MOST_WORDS = 300
_NEW_ROUTE, _PROHIBITED, _MAIN, _STATIC, _DESTINATION = 24, 8, 254, 4, 1
_REQUEST = 0x0405
"""NLM_F_REQUEST, NLM_F_ACK and NLM_F_CREATE."""
_JOINS = 'echo 0 > "$0/cgroup.procs"; exec "$@"'


def slirp4netns() -> str | None:
    """Returns the path of the program; None: it is not installed."""
    return shutil.which("slirp4netns")


def prepare(folder: str) -> None:
    """Writes `resolv.conf`, which names the tasks' resolver."""
    with open(f"{folder}/{RESOLV_CONF}", "w") as file:
        os.fchmod(file.fileno(), 0o644)
        file.write(f"nameserver {_RESOLVER}\n")


def serve(
    folder: str,
    program: str,
    cgroup: str | None,
    closed: Sequence[str] = (),
    *,
    pid: int,
    owner: int | None,
    ends: int,
) -> None:
    """Starts slirp4netns for the network namespace of process `pid`, and waits until the interface exists.

    Args:
        folder: the folder of the sandbox.
        program: `slirp4netns()`.
        cgroup: path of a cgroup for the process; None: that of this process.
        closed: addresses to which the tasks cannot connect.
        pid: a process in the namespace.
        owner: descriptor of the user namespace that owns the network namespace; None: the machine's.
        ends: descriptor of a pipe. When the other end is closed, slirp4netns ends.

    Raises:
        OSError: it cannot make the interface.
    """
    ready, saying = os.pipe()
    command = [
        program, "--configure", "--mtu=65520", "--disable-host-loopback", "--enable-seccomp",
        f"--exit-fd={ends}", f"--ready-fd={saying}", f"--api-socket={_SOCKET}", "--netns-type=path",
    ]  # fmt: skip
    # Its own sandbox needs the user 0, which an ordinary user's namespace does not have.
    command.append("--enable-sandbox" if owner is None else f"--userns-path=/proc/self/fd/{owner}")
    command += [f"/proc/{pid}/ns/net", "tap0"]
    if cgroup is not None:
        with open(f"{folder}/{_CGROUP}", "w") as file:
            file.write(cgroup)
        command = ["/bin/sh", "-c", _JOINS, cgroup, *command]
    kept = (ends, saying) if owner is None else (ends, saying, owner)
    try:
        with open(f"{folder}/{_LOG}", "wb") as log:
            # The socket's path is relative, because paths of sockets have at most 107 bytes.
            serving = subprocess.Popen(
                command, pass_fds=kept, cwd=folder, env={}, stdin=subprocess.DEVNULL, stdout=log,
                stderr=log, start_new_session=True,
            )  # fmt: skip
        os.close(saying)
        saying = -1
        if not os.read(ready, 1):
            status = serving.wait()
            with open(f"{folder}/{_LOG}", errors="replace") as lines:
                said = "; ".join(line.strip() for line in lines if not line.startswith("WARNING"))[:_MOST_WORDS]
            raise PermissionError(errno.EPERM, f"slirp4netns cannot make a network (status {status}): {said}")
        serving.returncode = 0  # It is not to be waited for.
        if closed:
            _close(closed, pid, owner)
    finally:
        for descriptor in (ready, saying):
            if descriptor >= 0:
                os.close(descriptor)


def _close(addresses: Sequence[str], pid: int, owner: int | None) -> None:
    """Adds routes that refuse connections to `addresses`. The other arguments are as in `serve`."""
    child = os.fork()
    if child == 0:
        code = errno.EPERM
        try:
            libc = ctypes.CDLL(None, use_errno=True)
            own = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
            for namespace in (own,) if owner is None else (owner, own):
                if libc.setns(namespace, 0) != 0:
                    raise OSError(ctypes.get_errno(), "setns")
            _prohibit(addresses)
            code = 0
        except OSError as error:
            code = error.errno or code
        finally:
            os._exit(code)
    if (code := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])) != 0:
        raise PermissionError(errno.EPERM, f"the tasks' network cannot refuse addresses: {os.strerror(abs(code))}")


def _prohibit(addresses: Iterable[str]) -> None:
    import socket  # As in `_ask`.

    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW) as routes:
        for address in addresses:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            packed = socket.inet_pton(family, address)
            body = struct.pack("=8BI", family, 8 * len(packed), 0, 0, _MAIN, _STATIC, 0, _PROHIBITED, 0)
            body += struct.pack("=HH", 4 + len(packed), _DESTINATION) + packed
            routes.send(struct.pack("=IHHII", 16 + len(body), _NEW_ROUTE, _REQUEST, 0, 0) + body)
            (code,) = struct.unpack_from("=i", routes.recv(4096), 16)
            if code and family == socket.AF_INET:  # Without IPv6 support, IPv6 addresses cannot be reached anyway.
                raise OSError(-code, os.strerror(-code))


def forward(folder: str, ports: Iterable[Sequence[int]]) -> None:
    """Forwards ports of the machine to ports of the tasks; `ports` are pairs (machine, task). Idempotent.

    Raises:
        OSError: the port of the machine is in use, or slirp4netns has ended.
    """
    open_ports = {one["host_port"] for one in _ask(folder, "list_hostfwd", {})["entries"]}
    for outside, inside in ports:
        if outside not in open_ports:
            place = {"host_addr": "0.0.0.0", "host_port": outside, "guest_addr": _ADDRESS, "guest_port": inside}
            _ask(folder, "add_hostfwd", {"proto": "tcp", **place})


def end(folder: str) -> None:
    """Ends the slirp4netns of a sandbox that is over, and removes its cgroup."""
    try:
        with open(f"{folder}/{_CGROUP}") as file:
            remove_cgroup(file.read())
    except FileNotFoundError:
        return


def _ask(folder: str, command: str, arguments: dict[str, Any]) -> dict[str, Any]:
    import socket  # Only where it is used, because every machine's zygote imports this module.

    inside = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(f"/proc/self/fd/{inside}/{_SOCKET}")
            client.sendall(json.dumps({"execute": command, "arguments": arguments}).encode())
            client.shutdown(socket.SHUT_WR)
            answer = json.loads(b"".join(iter(lambda: client.recv(4096), b"")))
    finally:
        os.close(inside)
    if "error" in answer:
        port = arguments.get("host_port")
        raise OSError(errno.EADDRINUSE, f"port {port} of the machine: {answer['error'].get('desc')}")
    return dict(answer)
