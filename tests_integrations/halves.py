"""Runs the tests in two processes: `python -m tests_integrations.halves [arguments of pytest]`.

Most tests use one core. They fork, which pytest-xdist's workers, with their threads, should not. The name of a test
decides to which half it belongs, and each half has its own memory of failures (`--last-failed`).
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

HALF = "MIZZEN_TESTS_HALF"
_NO_TESTS = 5


def main(arguments: Sequence[str]) -> int:
    """Runs both halves, shows the first one's output at once and the other's after it. Returns the first error."""
    begin = [sys.executable, "-m", "pytest", "-c", str(Path(__file__).with_name("pytest.ini")), "--rootdir", "."]
    halves = [
        subprocess.Popen(
            [*begin, "-o", f"cache_dir=.pytest_cache/half-{half}", *(arguments or ["tests_integrations"])],
            env=os.environ | {HALF: str(half)},
            stdout=subprocess.PIPE if half else None,
            stderr=subprocess.STDOUT if half else None,
        )
        for half in (0, 1)
    ]
    said, _ = halves[1].communicate()
    codes = [half.wait() for half in halves]
    sys.stdout.flush()
    sys.stdout.buffer.write(said)
    failed = [code for code in codes if code not in (0, _NO_TESTS)]
    return failed[0] if failed else min(codes)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
