"""Counts the lines of Python outside tests: `make size BASE=COMMIT`.

Prints three numbers of lines: in the wheels of the SDK and the server, in other distributions, and deleted since the
commit `BASE`. A line of a file that git finds to be moved is not deleted.
"""

import subprocess
import sys
from collections import Counter

WHEELS = (
    "activities", "agent", "api", "capacity", "client", "domain", "gms", "infra", "proxies", "reclaim", "rms", "sdk",
    "server", "services", "simulation", "tetris", "workflows",
)  # fmt: skip
OTHERS = ("reference", "research")
_TESTS = ("tests", "tests_integrations")


def lines_by_room(commit: str) -> Counter[str]:
    """Returns the lines of Python of each folder at the top level, at a commit, without tests."""
    found: Counter[str] = Counter()
    for row in _git("grep", "-c", "", commit, "--", "*.py").splitlines():
        path, _, count = row.removeprefix(f"{commit}:").rpartition(":")
        if not path.startswith(_TESTS):
            found[path.partition("/")[0]] += int(count)
    return found


def deleted(base: str) -> int:
    """Returns the lines of Python outside tests that the commits since `base` deleted; moved files do not count."""
    total = 0
    for row in _git("diff", "--numstat", "-M40%", "-l9999", base, "HEAD", "--", "*.py").splitlines():
        _, minus, path = row.split("\t")
        total += 0 if path.startswith(_TESTS) or not minus.isdigit() else int(minus)
    return total


def main(base: str | None) -> None:
    """Prints the figures of `HEAD`, and the deleted lines since `base`, if it is given."""
    rooms = lines_by_room("HEAD")
    for name, count in sorted(rooms.items()):
        print(f"{count:8,}  {name}")
    print(f"{sum(rooms[name] for name in WHEELS):8,}  in the wheels of the SDK and the server")
    print(f"{sum(rooms[name] for name in OTHERS):8,}  in other distributions")
    if base:
        fewer = sum(lines_by_room(base).values()) - sum(rooms.values())
        print(f"{deleted(base):8,}  deleted since {base}, and {fewer:,} fewer in all")


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 and sys.argv[1] else None)
