"""A server of the suite `killswitch`, as an application with a flag of its own: `python -m bench.killswitch_server`.

It accepts connections and reads a request from each. It checks the flag after each accept; when the flag is set, it
closes the connection and its listening socket, and listens again when the flag is cleared.
"""

import mmap
import socket
import sys
import time
from pathlib import Path

from bench.killswitch_traffic import REQUEST_BYTES, STAMP

FLAG, BEGUN_NS, BEGUN_BYTES, DONE_NS, DONE_BYTES, CLOSED_NS, SERVED = range(7)
"""Numbers of the values in the shared file, 8 bytes each: the flag; when the refusal began (0: not) and the bytes of
requests on connections that were opened later; when the call had returned, and the bytes on connections that were
opened after that; when the listening socket was closed (0: it is open); requests in total."""
SHARED_BYTES = mmap.PAGESIZE
_PAUSE_S = 0.0005


def shared(path: Path) -> memoryview:
    """Returns the values in the file at `path`."""
    with path.open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), SHARED_BYTES)).cast("Q")


def _serve(address: str, port: int, values: memoryview) -> None:
    while True:
        with socket.create_server((address, port), backlog=1024) as listener:
            print("listening", flush=True)
            values[CLOSED_NS] = 0
            while True:
                connection, _ = listener.accept()
                with connection:
                    if values[FLAG]:
                        break
                    request = connection.recv(REQUEST_BYTES)
                    values[SERVED] += 1
                    opened_ns = STAMP.unpack_from(request)[0] if len(request) >= STAMP.size else 0
                    for time_ns, sum_bytes in ((BEGUN_NS, BEGUN_BYTES), (DONE_NS, DONE_BYTES)):
                        if 0 < values[time_ns] < opened_ns:
                            values[sum_bytes] += len(request)
        values[CLOSED_NS] = time.monotonic_ns()
        while values[FLAG]:
            time.sleep(_PAUSE_S)


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]), shared(Path(sys.argv[3])))
