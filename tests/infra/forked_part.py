"""What the tests of the fork server run as a part of the stack: `python -m tests.infra.forked_part WHAT [ARGUMENT]`."""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path


def _facts() -> dict[str, object]:
    """What a process has from the one that started it."""
    told = os.environ.pop("TOLD_FD", None)
    if told is not None:
        os.write(int(told), b"+")
        os.close(int(told))
    umask = os.umask(0)
    descriptors = []
    for one in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # That of the folder itself.
            descriptors.append(f"{one.name} {one.readlink()}")
    return {
        "arguments": sys.argv[1:],
        "name": __name__,
        "environment": dict(os.environ),
        "umask": umask,
        "folder": str(Path.cwd()),
        "leads": os.getsid(0) == os.getpid(),
        "handlers": [str(signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGINT)],
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "command": Path("/proc/self/cmdline").read_bytes().replace(b"\0", b" ").decode().strip(),
        "open": sorted(descriptors),
        "path": sys.path,
    }


if __name__ == "__main__":
    match sys.argv[1]:
        case "facts":
            print(json.dumps(_facts()))
        case "exit":
            raise SystemExit(int(sys.argv[2]))
        case "raise":
            raise ValueError(sys.argv[2])
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "sleep":
            print(os.getpid(), flush=True)
            time.sleep(600)
