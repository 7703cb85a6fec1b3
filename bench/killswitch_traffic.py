"""The node of the suite `killswitch` (`bench.network_lab`): streams SYNs, and connects and sends requests."""

import ctypes
import os
import socket
import struct
import threading
import time

REQUEST_BYTES = 512
"""Size of a request."""
STAMP = struct.Struct("<Q")
"""A request begins with the time at which its connection was opened, in nanoseconds of the monotonic clock."""
_FRAMES = 64
PRIORITY = -15
"""Niceness of the stream and of the refusing process, so that neither waits on a busy computer."""
_PATIENCE_S = 0.05
_SPOOFED = "192.0.2.1"
"""Source of the stream: an address without a route, so that the machine does not answer."""
_libc = ctypes.CDLL(None, use_errno=True)


class _Piece(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


class _Message(ctypes.Structure):
    """`struct mmsghdr`."""

    _fields_ = [
        ("name", ctypes.c_void_p),
        ("name_length", ctypes.c_uint32),
        ("pieces", ctypes.POINTER(_Piece)),
        ("piece_count", ctypes.c_size_t),
        ("control", ctypes.c_void_p),
        ("control_length", ctypes.c_size_t),
        ("flags", ctypes.c_int),
        ("sent", ctypes.c_uint),
    ]


def stream(target: str, address: str, port: int, cpu: int) -> None:
    """Sends SYNs to a port without pause, in a thread on one CPU. `target` is the machine's MAC address in hex."""
    sender = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(0x0800))
    sender.bind(("eth0", 0))
    ethernet = bytes.fromhex(target) + sender.getsockname()[4] + b"\x08\x00"
    frames = [ctypes.create_string_buffer(ethernet + _syn(address, port, 20_000 + n)) for n in range(_FRAMES)]
    pieces = (_Piece * _FRAMES)(*(_Piece(ctypes.addressof(frame), len(frame) - 1) for frame in frames))
    messages = (_Message * _FRAMES)(*(_Message(None, 0, ctypes.pointer(piece), 1, None, 0, 0, 0) for piece in pieces))

    def send() -> None:
        os.sched_setaffinity(0, {cpu})
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), PRIORITY)
        while True:
            _libc.sendmmsg(sender.fileno(), messages, _FRAMES, 0)
            assert frames

    threading.Thread(target=send, daemon=True).start()


def work(address: str, port: int) -> None:
    """Opens connections one after the other in a thread, and sends a request on each."""

    def connect() -> None:
        while True:
            with socket.socket() as connection:
                connection.settimeout(_PATIENCE_S)
                opened_ns = time.monotonic_ns()
                try:
                    connection.connect((address, port))
                    connection.sendall(STAMP.pack(opened_ns).ljust(REQUEST_BYTES))
                    connection.recv(1)
                except OSError:  # Refused, or dropped until the timeout.
                    continue

    threading.Thread(target=connect, daemon=True).start()


def _syn(address: str, port: int, source_port: int) -> bytes:
    """Returns a SYN from the spoofed address as an IPv4 packet."""
    ends = socket.inet_aton(_SPOOFED) + socket.inet_aton(address)
    ip = struct.pack(">BBHHHBBH", 0x45, 0, 40, 0, 0, 64, 6, 0) + ends
    tcp = struct.pack(">HHIIBBHHH", source_port, port, 1, 0, 0x50, 0x02, 64_000, 0, 0)
    pseudo = ends + struct.pack(">BBH", 0, 6, len(tcp))
    return ip[:10] + _checksum(ip) + ip[12:] + tcp[:16] + _checksum(pseudo + tcp) + tcp[18:]


def _checksum(data: bytes) -> bytes:
    total = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return struct.pack(">H", ~total & 0xFFFF)
