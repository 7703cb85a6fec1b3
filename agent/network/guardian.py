"""Removes the shaping from a network interface when the agent ends for any reason.

A qdisc remains when the process that installed it is killed, so this small process waits for the end of the agent and
then deletes the qdisc. The kernel then installs the default qdisc again, which is what the interface had: mizzen never
replaces a qdisc that another program has configured. The process holds the lock of the interface (an inherited
descriptor) until the qdisc is deleted. Runs as a script in an isolated interpreter: standard library only.
"""

import contextlib
import errno
import os
import select
import signal
import socket
import struct
import sys

HANDLE = 0x4D5A0000
"""Handle of mizzen's root qdisc, `4d5a:`. A qdisc that the kernel installs by itself has the handle 0."""
READY = b"+"
_DELETE_QDISC, _REQUEST_ACK, _ERROR = 37, 0x5, 2
_HEADER, _TC = struct.Struct("=IHHII"), struct.Struct("=BxxxiIII")
_ROOT = 0xFFFFFFFF
_ABSENT = {errno.ENOENT, errno.EINVAL, errno.ENODEV}
"""Error numbers: the interface has no root qdisc, or another program's, or does not exist any more."""


def remove_shaping(index: int) -> bool:
    """Deletes mizzen's qdisc from the interface with this index; returns whether there was one.

    Raises:
        OSError: this process may not change the interface.
    """
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as netlink:
        body = _TC.pack(socket.AF_UNSPEC, index, HANDLE, _ROOT, 0)
        netlink.send(_HEADER.pack(_HEADER.size + len(body), _DELETE_QDISC, _REQUEST_ACK, 1, 0) + body)
        answer = netlink.recv(4096)
    if _HEADER.unpack_from(answer)[1] != _ERROR:
        raise OSError(f"interface {index}: the kernel sent an invalid response to the deletion of a qdisc")
    code = -struct.unpack_from("=i", answer, _HEADER.size)[0]
    if code in _ABSENT:
        return False
    if code:
        raise OSError(code, f"interface {index}: cannot delete the qdisc: {os.strerror(code)}")
    return True


def _main(index: int, parent: int, lock: str) -> None:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # The process ends after its agent, also if both get a signal.
    try:
        ended = os.pidfd_open(parent)
    except ProcessLookupError:
        ended = None
    if ended is not None and os.getppid() == parent:
        with contextlib.suppress(BrokenPipeError):
            os.write(1, READY)
        select.select([ended, 0], [], [])
    remove_shaping(index)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(lock)  # Still locked: the next holder of a lock checks that the file has its name.


if __name__ == "__main__":
    _main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
