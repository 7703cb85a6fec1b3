"""balance: CPU of the balancer for each request, its delay of streams, and requests lost while replicas change.

The replicas are an HAProxy that answers with 200 bytes by itself, which costs less CPU than any other server here. The
reference is Debian's nginx with one worker, with keepalive to the replicas, the same added headers and a log. CPU is
the user and system time of all processes of the proxy. For the balancer these are HAProxy and its supervisor, which
also counts the requests and reports them. Streams are measured through the balancer and directly from the replica.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

from bench.balance_api import NAME, BalanceApi
from bench.harness import Bench, Figure, InvalidBenchmark, Line, Suite, interleave, medians
from infra.stack.ports import free_port
from proxies.balance.process import find_haproxy

CONNECTIONS = (16, 64)
_LOAD_S = 4.0
_STREAMS, _CHUNKS, _EVERY_S = 200, 50, 0.1
_CHANGES = 1000
_LONGEST_S = 300.0
_START_S = 60.0
_TICKS = os.sysconf("SC_CLK_TCK")
LINES = (
    *(Line(f"CPU for each request over nginx, {number} connections", 1.5) for number in CONNECTIONS),
    Line("time to the first byte over a direct connection, P99 of 200 streams", None),
    Line("lag of chunks over a direct connection, P99 of 200 streams", None),
    Line("requests lost in 1,000 changes of replicas, of all", 0.0),
)
_REPLICAS = """
global
  nbthread 1
defaults
  mode http
  timeout client 60s
frontend replicas
{binds}
  http-request return status 200 content-type text/plain string "{body}"
"""
_NGINX = """
daemon off; pid {folder}/nginx.pid; error_log {folder}/error.log; worker_processes 1;
events {{ worker_connections 4096; }}
http {{
  access_log {folder}/access.log;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  keepalive_requests 100000000;
  upstream replicas {{ {servers} keepalive 128; keepalive_requests 100000000; }}
  server {{
    listen 127.0.0.1:{port};
    location / {{
      proxy_pass http://replicas; proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_set_header X-Forwarded-For $proxy_add_x_forwarded_for; proxy_set_header X-Forwarded-Proto $scheme;
    }}
  }}
}}
"""


def entry(number: int, port: int) -> dict[str, object]:
    """Returns a replica's entry of a list."""
    return {
        "replica": number, "address": "127.0.0.1", "port": port, "region": "east", "zone": "a",
        "gpu_type": "a100", "kind": "spot", "state": "ready", "is_canary": False,
    }  # fmt: skip


@contextmanager
def process(
    arguments: Iterable[str | Path], port: int, environment: Mapping[str, str] | None = None, folder: Path | None = None
) -> Iterator[int]:
    """Runs a server until it answers on `port`, yields its process id, and ends it.

    `environment` is added to the variables of this process, and `folder` is the working folder, if it is given.
    """
    started = subprocess.Popen(
        [str(one) for one in arguments],
        env={**os.environ, **(environment or {})},
        cwd=folder,
        stderr=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )
    try:
        deadline_s = time.monotonic() + _START_S
        while True:
            try:
                if httpx.get(f"http://127.0.0.1:{port}/", timeout=2).status_code == 200:
                    break
            except httpx.TransportError:
                pass
            if time.monotonic() >= deadline_s or started.poll() is not None:
                raise InvalidBenchmark(f"{started.args!r} does not answer")
            time.sleep(0.05)
        yield started.pid
    finally:
        started.terminate()
        started.wait()


def cpu_s(pid: int) -> float:
    """Returns the user and system time of a process and its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return (int(fields[11]) + int(fields[12])) / _TICKS + sum(cpu_s(int(child)) for child in children)


def load(*arguments: str | int | float) -> dict[str, float]:
    """Runs `bench.balance_load` and returns what it printed."""
    done = subprocess.run(
        [sys.executable, "-m", "bench.balance_load", *map(str, arguments)], check=True, stdout=subprocess.PIPE
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def replicas(stack: ExitStack, folder: Path) -> list[int]:
    """Starts the server that stands for two replicas, and returns their ports."""
    ports = [free_port(), free_port()]
    binds = "\n".join(f"  bind 127.0.0.1:{port}" for port in ports)
    (folder / "replicas.cfg").write_text(_REPLICAS.format(binds=binds, body="x" * 200))
    stack.enter_context(process([find_haproxy(None), "-db", "-f", folder / "replicas.cfg"], ports[0]))
    return ports


def balanced(stack: ExitStack, folder: Path, ports: Sequence[int]) -> tuple[BalanceApi, int, int]:
    """Starts an API and a balancer for replicas on these ports. Returns the API, the process id and the port."""
    api = BalanceApi()
    api.set([entry(number, port) for number, port in enumerate(ports)])
    api.start()
    stack.callback(api.stop)
    ours = free_port()
    command: list[str | Path] = [
        sys.executable,
        "-m",
        "server",
        "balance",
        "--data",
        folder / "balancer",
        "--stop-s",
        "1",
    ]
    environment = {"MIZZEN_API": api.url, "MIZZEN_API_KEY": ""}
    pid = process([*command, "--service", f"{NAME}=127.0.0.1:{ours}"], ours, environment)
    return api, stack.enter_context(pid), ours


def cpu_us(pid: int, port: int, connections: int) -> float:
    """Returns the CPU microseconds for each request."""
    before_s = cpu_s(pid)
    done = load("requests", port, connections, _LOAD_S)
    if done["lost"] or not done["answered"]:
        raise InvalidBenchmark(f"port {port}: {done}")
    return (cpu_s(pid) - before_s) / done["answered"] * 1e6


def run(bench: Bench) -> Iterator[Figure]:
    """Yields the figures of all lines."""
    nginx = shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
    if nginx is None:
        raise InvalidBenchmark("nginx is not installed: apt-get install nginx-light")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mizzen-bench-")))
        ports = replicas(stack, folder)
        api, pid, ours = balanced(stack, folder, ports)
        reference = free_port()
        servers = " ".join(f"server 127.0.0.1:{port};" for port in ports)
        (folder / "nginx.conf").write_text(_NGINX.format(folder=folder, port=reference, servers=servers))
        other = stack.enter_context(process([nginx, "-c", folder / "nginx.conf"], reference))
        for line, connections in zip(LINES, CONNECTIONS, strict=False):
            bench.say(f"{connections} connections")
            found = medians(
                interleave(
                    bench,
                    {
                        "balancer_us": lambda n=connections: cpu_us(pid, ours, n),  # type: ignore[misc]
                        "nginx_us": lambda n=connections: cpu_us(other, reference, n),  # type: ignore[misc]
                    },
                )
            )
            yield _figure(
                line, found["balancer_us"] / found["nginx_us"], found, bench.rounds, {"connections": connections}
            )
        yield _changes(bench, api, ours, ports)
    yield from _streams(bench)


def _changes(bench: Bench, api: BalanceApi, port: int, ports: list[int]) -> Figure:
    """Replaces one of two replicas a thousand times, under load from 16 connections."""
    bench.say("changes of replicas")
    arguments = [sys.executable, "-m", "bench.balance_load", "requests", str(port), "16", str(_LONGEST_S)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE) as client:
        start_s, number = time.monotonic(), 0
        while number < _CHANGES:
            number += 1
            fetches = api.fetches
            # Each replica has a new number, so each change adds a server and drains another.
            api.set([entry(number, ports[0]), entry(number + 1, ports[1])], drain_s=5)
            while api.fetches == fetches:
                time.sleep(0.002)
        took_s = time.monotonic() - start_s
        client.terminate()
        text = client.communicate()[0]
    done = json.loads(text)
    if took_s >= _LONGEST_S or not done["answered"]:
        raise InvalidBenchmark(f"the load ended before the changes, after {took_s:.0f} s: {done}")
    absolute = {**done, "changes_s": took_s}
    return _figure(LINES[4], done["lost"] / done["answered"], absolute, 1, {"changes": _CHANGES})


def _streams(bench: Bench) -> Iterator[Figure]:
    """Measures streams of a replica in Python, through the balancer and directly."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mizzen-bench-")))
        port, ours = free_port(), free_port()
        replica = [sys.executable, "-m", "bench.balance_replica", str(port), str(_CHUNKS), str(_EVERY_S)]
        stack.enter_context(process(replica, port))
        _, _, ours = balanced(stack, folder, [port])

        def measured(name: str, at: int) -> dict[str, float]:
            return {f"{name}_{key}": value for key, value in load("streams", at, _STREAMS).items() if key[-2:] == "_s"}

        rounds = Bench(min(bench.rounds, 3), bench.say)
        found = medians(
            interleave(
                rounds, {"balancer": lambda: measured("balancer", ours), "direct": lambda: measured("direct", port)}
            )
        )
    for line, kind in ((LINES[2], "first_byte"), (LINES[3], "lag")):
        values = {name: value for name, value in found.items() if kind in name}
        ratio = values[f"balancer_{kind}_p99_s"] / values[f"direct_{kind}_p99_s"]
        yield _figure(line, ratio, values, rounds.rounds, {"streams": _STREAMS, "chunks": _CHUNKS})


def _figure(line: Line, ratio: float, absolute: dict[str, float], rounds: int, sizes: dict[str, float | str]) -> Figure:
    return Figure(SUITE.name, line, ratio, absolute, rounds, sizes)


SUITE = Suite("balance", LINES, run)
