"""waiting-elements: the CPU time to submit an array of 10,000 elements, and the idle cost of 100,000 that wait.

`mizzen up` runs with default settings, on a fleet of one machine with one GPU, which one workload holds throughout. One
run measures CPU seconds of the process tree of `mizzen up` on the same stack: over an idle period with an empty queue,
from the POST of an array of 10,000 elements until its reasons are published, and over an idle period of the same length
with 100,000 elements waiting.

    python -m bench.waiting_elements --idle-s 30 --settle-s 10     # a short form
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import click
from sqlalchemy import select

from bench.backlog import BacklogSizes, BacklogStack, cpu_s, document
from bench.harness import Bench, Figure, Line, Suite
from infra.db.logs import Outbox, Waiting
from infra.db.models import Workload

FEW, MANY = 10_000, 100_000
LINES = (
    Line("idle CPU with 100,000 waiting elements over that with an empty queue", 1.5),
    Line("CPU seconds to submit an array of 10,000 elements", 1.0),
)


def measure(sizes: BacklogSizes, say: Callable[[str], None]) -> Iterator[Figure]:
    """Yields the figures of all lines, from one round."""
    shown: dict[str, float | str] = {"idle_s": sizes.idle_s, "settle_s": sizes.settle_s}

    def figure(line: int, ratio: float, absolute: Mapping[str, float]) -> Figure:
        return Figure("waiting-elements", LINES[line], ratio, absolute, 1, shown)

    with tempfile.TemporaryDirectory(prefix=".bench-", dir=Path.cwd()) as name, ExitStack() as exit_:
        say("starting the stack")
        stack = BacklogStack(Path(name), exit_)
        client = exit_.enter_context(stack.client())
        client.set_tenant("t", 3, {}, None)
        client.submit(document("holder", "sleep 1000000"))
        stack.until(lambda: stack.count(select(Workload.id).where(Workload.phase == "running")) == 1)
        say("idle, empty queue")
        empty = stack.idle(sizes)

        def submit(elements: int) -> float:
            """Returns the CPU seconds until the array waits with a reason and the outbox is empty."""
            before = cpu_s(stack.process.pid)["all"]
            made = client.submit({**document("array"), "array": f"0-{elements - 1}"})["id"]
            stack.until(lambda: stack.count(select(Waiting.workload).where(Waiting.workload == made)) == 1)
            stack.until(lambda: stack.count(select(Outbox.id).where(Outbox.delivered_at.is_(None))) == 0)
            return cpu_s(stack.process.pid)["all"] - before

        say(f"array of {FEW} elements")
        few_s = submit(FEW)
        yield figure(1, few_s, {"cpu_s": few_s})
        submit(MANY - FEW)
        say("idle, waiting elements")
        waiting = stack.idle(sizes)
        absolute = {f"{part}_s": seconds for part, seconds in waiting.items()}
        yield figure(0, waiting["all"] / empty["all"], {**absolute, "empty_s": empty["all"]})


def run(bench: Bench) -> Iterator[Figure]:
    """Yields the figures of all lines at full size, from one round, which takes a quarter of an hour."""
    yield from measure(BacklogSizes(), bench.say)


SUITE = Suite("waiting-elements", LINES, run)


@click.command()
@click.option("--idle-s", type=click.FloatRange(min=1), default=BacklogSizes.idle_s, show_default=True)
@click.option("--settle-s", type=click.FloatRange(min=0), default=BacklogSizes.settle_s, show_default=True)
def main(idle_s: float, settle_s: float) -> None:
    """Measures with other durations, and prints one figure per line as JSON."""
    sizes = BacklogSizes(idle_s=idle_s, settle_s=settle_s)
    for figure in measure(sizes, lambda text: click.echo(f"waiting-elements: {text}", err=True)):
        print(figure.to_json(), flush=True)


if __name__ == "__main__":
    main()
