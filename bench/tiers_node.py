"""A node of the suite `tiers` (`bench.network_lab`): a machine with a training, or the one with the bucket."""

import json
import os
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

from moto.s3.models import FakeKey

from bench import buckets
from bench.harness import InvalidBenchmark
from infra.stack.supervisor import dies_with_parent

_left_open = ExitStack()
_contents: WeakKeyDictionary[FakeKey, bytes] = WeakKeyDictionary()


def serve_bucket(address: str) -> dict[str, Any]:
    """Runs an S3 server, and returns the URL of a root and the environment with which it is opened.

    moto reads the whole object for each range. Here it keeps what it has read, so that the link is the limit.
    """
    whole: Any = vars(FakeKey)["value"]

    def value(key: Any) -> bytes:
        if (kept := _contents.get(key)) is None:
            _contents.clear()
            kept = _contents[key] = whole.fget(key)
        return kept

    def set_value(key: Any, new: bytes) -> None:
        _contents.pop(key, None)
        whole.fset(key, new)

    _left_open.enter_context(mock.patch.object(FakeKey, "value", property(value, set_value)))
    endpoint = _left_open.enter_context(buckets.s3(address))
    return {"root": endpoint.bucket(), "environ": endpoint.environ}


def limit(rate: str) -> None:
    """Limits what this machine sends."""
    words = ["qdisc", "add", "dev", "eth0", "root", "tbf", "rate", rate, "burst", "64k", "latency", "50ms"]
    subprocess.run(["tc", *words], check=True)


def unlimit() -> None:
    """Removes the limit."""
    subprocess.run(["tc", "qdisc", "del", "dev", "eth0", "root"], check=True)


def offload() -> None:
    """Sends large segments, as a network card with offload does."""
    subprocess.run(["ip", "link", "set", "eth0", "gso_max_segs", "65535"], check=True)


def hold(environ: dict[str, str], root: str, address: str, memory_bytes: int) -> None:
    """Starts a memory server on this machine, and returns when it answers."""
    command = [sys.executable, "-W", "ignore", "-m", "mizzen.memory", root, "--address", address]
    command = [*dies_with_parent("KILL"), *command, "--memory-bytes", str(memory_bytes)]
    process = subprocess.Popen(command, env={**os.environ, **environ}, stderr=subprocess.DEVNULL)
    while not list(Path(environ["MIZZEN_MEMORY_DIR"]).glob("*/*.sock")):
        if process.poll() is not None:
            raise InvalidBenchmark(f"the memory server ended with {process.returncode}")
        time.sleep(0.05)
    time.sleep(1)  # The address is published after the socket exists.


def train(environ: dict[str, str], **options: Any) -> Any:
    """Runs `bench.tiers_process` in a new process on this machine, and returns what it measures."""
    command = [sys.executable, "-W", "ignore", "-m", "bench.tiers_process", json.dumps(options)]
    ended = subprocess.run(command, env={**os.environ, **environ}, capture_output=True, text=True, check=False)
    if ended.returncode:
        raise InvalidBenchmark(f"the training ended with {ended.returncode}: {ended.stderr[-2000:]}")
    return json.loads(ended.stdout)
