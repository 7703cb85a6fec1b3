"""Checks an uploaded archive in a separate process: `python -m api.data.archive_check LIMITS < archive`.

The cost of reading an untrusted archive is not known in advance. A separate process can be killed, and the kernel
limits its memory and CPU time. The result is JSON on stdout: the paths in the archive, or an error.
"""

import base64
import json
import os
import resource
import sys

from infra.archives import BadArchive, inspect_archive


def main() -> None:
    """Checks the archive on stdin."""
    limits = json.loads(sys.argv[1])
    os.nice(10)  # Requests have priority.
    cpu_s = limits["cpu_s"]
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    resource.setrlimit(resource.RLIMIT_AS, (limits["memory_bytes"], limits["memory_bytes"]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    answer: dict[str, str | None]
    try:
        tree = inspect_archive(sys.stdin.buffer, max_bytes=limits["max_bytes"], max_members=limits["max_members"])
        answer = {"paths": base64.b64encode(tree.dump()).decode()}
    except BadArchive as error:
        answer = {"message": str(error), "member": error.member}
    except (MemoryError, RecursionError):
        answer = {"message": "reading the archive's headers exceeds the memory limit", "member": None}
    while sys.stdin.buffer.read(1 << 20):
        pass  # Otherwise the sender would get a broken pipe.
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
