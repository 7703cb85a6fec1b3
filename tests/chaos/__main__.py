"""Runs chaos tests for one or more seeds, one after the other. The exit code is 1 if there was a violation."""

import json
import sys
import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path

import click

from tests.chaos.judge import KINDS
from tests.chaos.run import run_seed
from tests.chaos.schedule import FAULTS, draw_schedule


@click.command(help=__doc__)
@click.option("--seed", default=1, show_default=True, help="The first seed.")
@click.option("--seeds", default=1, show_default=True, help="Number of consecutive seeds.")
@click.option("--minutes", default=10.0, show_default=True, help="Duration of the faults, per seed.")
@click.option("--fault-every-s", default=7.0, show_default=True, help="Mean time between two faults, in seconds.")
@click.option("--submit-every-s", default=3.0, show_default=True, help="Mean time between two submissions, in seconds.")
@click.option(
    "--out", type=click.Path(path_type=Path), help="Folder for journals and logs; default: a new temporary folder."
)
def main(seed: int, seeds: int, minutes: float, fault_every_s: float, submit_every_s: float, out: Path | None) -> None:
    folder = out or Path(tempfile.mkdtemp(prefix="mizzen-chaos-"))
    by_kind: Counter[str] = Counter()
    faults: Counter[str] = Counter()
    bad: list[int] = []
    workloads = runs = preempted = 0
    for number in range(seed, seed + seeds):
        click.echo(f"seed {number}: {minutes:g} minutes of faults", err=True)
        schedule = draw_schedule(number, minutes * 60, fault_every_s, submit_every_s)
        place = folder / f"seed-{number}"
        outcome = run_seed(number, schedule, place, lambda line: click.echo(f"  {line}", err=True))
        (place / "observed.json").write_text(json.dumps(asdict(outcome.observed), indent=1, default=sorted))
        (place / "violations.json").write_text(json.dumps([asdict(v) for v in outcome.violations], indent=1))
        for violation in outcome.violations:
            click.echo(f"  VIOLATION {violation.kind}: {violation.detail}")
        by_kind.update(v.kind for v in outcome.violations)
        faults.update(outcome.faults)
        workloads, runs = workloads + outcome.workloads, runs + outcome.task_runs
        preempted += outcome.preempted
        bad += [number] if outcome.violations else []
        click.echo(
            f"seed {number}: {len(outcome.violations)} violations; {outcome.workloads} workloads, "
            f"{outcome.task_runs} task runs ({outcome.preempted} preempted), {outcome.faults.total()} faults"
        )
    click.echo(
        f"total: {workloads} workloads, {runs} task runs ({preempted} preempted), {faults.total()} faults; "
        f"journals and logs are in {folder}"
    )
    click.echo("faults: " + ", ".join(f"{kind} {faults[kind]}" for kind in FAULTS))
    for kind, meaning in KINDS.items():
        if by_kind[kind]:
            click.echo(f"{by_kind[kind]:5d}  {kind}: {meaning}")
    if bad:
        click.echo(f"seeds with violations: {', '.join(map(str, bad))}; repeat one with --seed N --minutes {minutes:g}")
        sys.exit(1)
    click.echo("no violations")


if __name__ == "__main__":
    main()
