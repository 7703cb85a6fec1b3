"""Checking an uploaded archive, in a process of its own: `python -m api.data.archive_check LIMITS < archive`.

Nobody knows what an untrusted archive costs before reading it. So it is read where the kernel bounds memory and CPU
time, and where it can be killed. The answer is JSON on stdout: the paths in it, or what is wrong.
"""

import base64
import json
import os
import resource
import sys

from infra.archives import BadArchive, inspect_archive


def main() -> None:
    """Checks what stdin holds."""
    limits = json.loads(sys.argv[1])
    os.nice(10)  # Requests come first.
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
        answer = {"message": "the archive's headers need more memory than is allowed", "member": None}
    while sys.stdin.buffer.read(1 << 20):
        pass  # The sender must not find a closed pipe.
    sys.stdout.write(json.dumps(answer))


if __name__ == "__main__":
    main()
