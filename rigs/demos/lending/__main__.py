"""Runs the scenario on the terminal: `python -m rigs.demos.lending [PAUSE_S]`; the exit code is 1 if a check fails."""

import sys
import tempfile
import time
from pathlib import Path

from rigs.demos.lending.installation import installation
from rigs.demos.lending.outcome import checks, rows
from rigs.demos.lending.picture import picture
from rigs.demos.lending.scenario import LendingDemoScenario

_PAUSE_S = 6.0
_OUT = Path("demo-lending")


def main() -> int:
    """Runs the scenario, prints its table and its checks, and draws the picture; returns the exit code."""
    began_s = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began_s:6.1f} s  {line}", flush=True)

    pause_s = float(sys.argv[1]) if len(sys.argv) > 1 else _PAUSE_S
    with tempfile.TemporaryDirectory() as folder:
        say("starting mizzen with two buildings of lent machines, each with a store")
        with installation(Path(folder)) as site:
            course = LendingDemoScenario(site, pause_s, say).run()
    table, held = rows(course), checks(course)
    width = max(len(row.event) for row in table)
    print(f"\n{'event':<{width}}  no task   bound    free  steps done again  at most")
    for row in table:
        times = f"{row.gone_s:5.2f} s  {row.bound_s:4.0f} s  {row.free_s:4.2f} s"
        print(f"{row.event:<{width}}  {times}  {row.redone:16}  {row.allowed:7}")
    print()
    for check in held:
        print(f"{'holds' if check.passed else 'FAILS'}  {check.name}: {check.found}")
    _OUT.mkdir(exist_ok=True)
    path = _OUT / "timeline.svg"
    path.write_text(picture(course))
    print(f"\npicture: {path}")
    return 0 if all(check.passed for check in held) else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        print("interrupted: everything was stopped", file=sys.stderr)
        sys.exit(130)
