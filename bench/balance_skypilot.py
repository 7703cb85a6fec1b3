"""CPU of the balancer for each request, relative to SkyPilot's own load balancer: `make bench-skypilot`.

SkyPilot runs in its own environment, because it has a hundred dependencies. Its load balancer gets the replicas from a
controller on loopback. Everything else is as in `bench.balance`.
"""

import json
import tempfile
import threading
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import click

from bench.balance import CONNECTIONS, balanced, cpu_us, process, replicas
from bench.command import EXIT_SHORT
from bench.harness import Bench, Figure, Line, interleave, medians
from infra.stack.ports import free_port

LINES = tuple(
    Line(f"CPU for each request over SkyPilot's balancer, {number} connections", 0.1) for number in CONNECTIONS
)


def _controller(urls: list[str]) -> ThreadingHTTPServer:
    """Returns a running controller that answers each request with the list of replicas."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            """Answers with the list of replicas."""
            self.rfile.read(int(self.headers["content-length"]))
            text = json.dumps({"replica_info": {url: {} for url in urls}}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, format: str, *args: object) -> None:
            """Logs nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


@click.command()
@click.option("--python", type=click.Path(exists=True, path_type=Path), required=True, help="With SkyPilot installed.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
def main(python: Path, rounds: int) -> None:
    """Measure both balancers alternately, and print one JSON object for each number of connections."""
    bench = Bench(rounds, lambda text: click.echo(f"skypilot: {text}", err=True))
    is_short = False
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mizzen-bench-")))
        ports = replicas(stack, folder)
        _, ours, our_port = balanced(stack, folder, ports)
        controller = _controller([f"http://127.0.0.1:{port}" for port in ports])
        stack.callback(controller.shutdown)
        port = free_port()
        command: list[str | Path] = [
            python.absolute(), "-m", "sky.serve.load_balancer", "--load-balancer-port", str(port),
            "--controller-addr", f"http://127.0.0.1:{controller.server_port}",
        ]  # fmt: skip
        theirs = stack.enter_context(process(command, port, {"HOME": str(folder), "PYTHONPATH": ""}, folder))
        for line, connections in zip(LINES, CONNECTIONS, strict=True):
            found = medians(
                interleave(
                    bench,
                    {
                        "balancer_us": lambda n=connections: cpu_us(ours, our_port, n),  # type: ignore[misc]
                        "skypilot_us": lambda n=connections: cpu_us(theirs, port, n),  # type: ignore[misc]
                    },
                )
            )
            ratio = found["balancer_us"] / found["skypilot_us"]
            figure = Figure("balance-skypilot", line, ratio, found, rounds, {"connections": connections})
            click.echo(figure.to_json())
            is_short |= not figure.holds
    raise SystemExit(EXIT_SHORT if is_short else 0)


if __name__ == "__main__":
    main()
