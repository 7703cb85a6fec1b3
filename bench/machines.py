"""machines: the CPU time that idle machines cost the control plane, and the time until a lost machine is noticed.

`mizzen up` runs with default settings, once with one machine and once with 300, each with its own agent. CPU is the
user and system time of Temporal, the worker and Postgres without any requests; the figure is what 299 more machines
add. The agents' CPU time is shown but does not count. Then a machine is powered off. The time until it counts as lost
is compared with the sum of the settings `heartbeat_timeout_s` and `node_lost_after_s`.

    python -m bench.machines --machines 50 --idle-s 30 --settle-s 20      # a short form
"""

import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import click
from sqlalchemy import select

from agent.fleet import power_off
from bench import backlog
from bench.harness import Bench, Figure, Line, Suite
from infra.config.scheduling import LifecycleSettings
from infra.db.models import Machine
from server.agents import machine_state_dir

FLEET = """
version: 1
regions:
  - name: east
    clusters:
      - name: a
        machines: [{{name: m, count: {machines}, gpus: 1, gpu_type: a100, cpus: 8, memory: 16GiB}}]
"""
CONTROL = ("temporal", "worker", "postgres")


@dataclass(frozen=True)
class MachineSizes:
    """The number of machines, and the durations of the measurement."""

    machines: int = 300
    idle_s: float = 120.0
    settle_s: float = 60.0


LINES = (
    Line("CPU of the control plane for 300 idle machines, of a core", 0.08),
    # 5 % tolerance for the last steps: Temporal's timers, a workflow task, and the update of the row.
    Line("time until a lost machine is noticed, of what is promised", 1.05),
)


def _idle(
    folder: Path, machines: int, sizes: MachineSizes, exit_: ExitStack
) -> tuple[backlog.BacklogStack, dict[str, float]]:
    folder.mkdir()
    stack = backlog.BacklogStack(folder, exit_, FLEET.format(machines=machines), machines)
    return stack, stack.idle(backlog.BacklogSizes(0, sizes.idle_s, sizes.settle_s))


def measure(sizes: MachineSizes, say: Callable[[str], None]) -> Iterator[Figure]:
    """Yields the figures one after the other."""

    def figure(number: int, value: float, absolute: dict[str, float]) -> Figure:
        shown = {"machines": sizes.machines, "idle_s": sizes.idle_s}
        return Figure("machines", LINES[number], value, absolute, 1, shown)

    with tempfile.TemporaryDirectory(prefix=".bench-", dir=Path.cwd()) as name:
        with ExitStack() as exit_:
            say("one machine")
            _, one = _idle(Path(name) / "one", 1, sizes, exit_)
        with ExitStack() as exit_:
            say(f"{sizes.machines} machines")
            stack, many = _idle(Path(name) / "many", sizes.machines, sizes, exit_)
            added = {part: (many[part] - one[part]) / sizes.idle_s for part in many}
            control = sum(added[part] for part in CONTROL)
            absolute = {f"{part}_of_a_core": added[part] for part in (*CONTROL, "agents")}
            absolute["of_10000_machines_cores"] = control * 10_000 / sizes.machines
            yield figure(0, control * 300 / sizes.machines, absolute)
            say("powering off a machine")
            machine = f"east/a/m-{sizes.machines}" if sizes.machines > 1 else "east/a/m-1"
            power_off(machine_state_dir(stack.data, machine))
            began_s = time.monotonic()
            is_lost = select(Machine.id).where(Machine.id == machine, Machine.state == "lost")
            stack.until(lambda: stack.count(is_lost) == 1, 300.0)
            lost_s = time.monotonic() - began_s
            lifecycle = LifecycleSettings()
            promised_s = lifecycle.heartbeat_timeout_s + lifecycle.node_lost_after_s
            yield figure(1, lost_s / promised_s, {"lost_s": lost_s, "promised_s": promised_s})


def run(bench: Bench) -> Iterator[Figure]:
    """Yields the figures of the suite, from one round."""
    yield from measure(MachineSizes(), bench.say)


SUITE = Suite("machines", LINES, run)


@click.command()
@click.option("--machines", type=click.IntRange(min=1), default=MachineSizes.machines, show_default=True)
@click.option("--idle-s", type=click.FloatRange(min=1), default=MachineSizes.idle_s, show_default=True)
@click.option("--settle-s", type=click.FloatRange(min=0), default=MachineSizes.settle_s, show_default=True)
def main(machines: int, idle_s: float, settle_s: float) -> None:
    """Measures with other sizes, and prints one figure per line as JSON."""
    for figure in measure(
        MachineSizes(machines, idle_s, settle_s), lambda text: click.echo(f"machines: {text}", err=True)
    ):
        click.echo(figure.to_json())


if __name__ == "__main__":
    main()
