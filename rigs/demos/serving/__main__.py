"""Runs the scenario on the terminal: `python -m rigs.demos.serving [SECONDS [REQUESTS_PER_S]]`."""

import sys
import tempfile
import time
from pathlib import Path

from rigs.demos.serving.installation import installation
from rigs.demos.serving.report import rows, write_report
from rigs.demos.serving.scenario import ServingDemoScenario

_SECONDS, _PER_S, _TARGET = 600.0, 35.0, 4
_OUT = Path("serve-demo")


def main() -> None:
    """Runs the scenario, prints its figures and writes the report."""
    began_s = time.monotonic()

    def say(line: str) -> None:
        print(f"{time.monotonic() - began_s:6.1f} s  {line}", flush=True)

    given = [float(text) for text in sys.argv[1:3]]
    seconds, per_s = [*given, _SECONDS, _PER_S][:2] if len(given) != 1 else (given[0], _PER_S)
    with tempfile.TemporaryDirectory() as folder:
        say("starting mizzen with a simulated cloud: three spot zones and one with on-demand machines")
        with installation(Path(folder)) as site:
            course = ServingDemoScenario(site, seconds, per_s, _TARGET, say).run()
            page = write_report(course, site.folder / "requests.jsonl", _OUT)
    width = max(len(name) for name, _ in rows(course))
    print("", *(f"{name:<{width}}  {value}" for name, value in rows(course)), f"report: {page}", sep="\n")


if __name__ == "__main__":
    main()
