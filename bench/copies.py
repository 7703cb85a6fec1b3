"""copies: small objects copied by the engine (`infra.copies.copy`), against a simple implementation.

The objects are 4 KiB of random bytes under one prefix, generated once. Each round copies all of them to an empty place:

- `files`: a simple loop reads each file, writes a temporary file, syncs it and renames it. The engine also syncs
  folders, reads back what it wrote, marks the copy, and checks which objects exist already.
- `S3, up` and `S3, down`: boto3 with ten threads, `put_object` of a file and `get_object` into a file, without fsync or
  comparison. `S3, within`: `copy_object`. moto serves S3 on loopback, in a separate process; the time to open stores
  and clients does not count.

The folders are below the current folder, because a folder for temporary files may be in memory, where fsync is free.
"""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import numpy as np

from bench.harness import Bench, Figure, InvalidBenchmark, Line, Suite, interleave, medians, seconds
from infra.copies import open_copy_store
from infra.copies.copy import copy_prefix

OBJECT_BYTES = 4096
FILES, OBJECTS, THREADS = 2000, 600, 10
_START_S = 30.0
LINES = tuple(Line(name, 0.8, at_least=True) for name in ("files", "S3, up", "S3, down", "S3, within"))


@contextmanager
def _s3() -> Iterator[str]:
    """Runs a temporary S3 server in a separate process, and yields its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    url, give_up_s = f"http://127.0.0.1:{port}", time.monotonic() + _START_S
    try:
        while True:
            try:
                httpx.get(url)
                break
            except httpx.TransportError as error:
                if process.poll() is not None or time.monotonic() > give_up_s:
                    raise InvalidBenchmark("the S3 server did not start") from error
                time.sleep(0.1)
        yield url
    finally:
        process.kill()
        process.wait()


class _Rounds:
    """The implementations; each call copies all objects to an empty place, and returns the seconds."""

    def __init__(self, root: Path, url: str) -> None:
        import boto3

        keys = {"AWS_ENDPOINT_URL": url, "AWS_DEFAULT_REGION": "us-east-1"}
        os.environ |= {**keys, "AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench"}
        self.root = root
        self.client: Any = boto3.client("s3")
        self.source = self._folder()
        draw = np.random.default_rng(1)
        for number in range(FILES):
            (self.source / "t" / self._name(number)).write_bytes(draw.bytes(OBJECT_BYTES))
        self.few = self._folder()
        for number in range(OBJECTS):
            shutil.copy(self.source / "t" / self._name(number), self.few / "t")
        self.bucket = self._bucket()
        self._each(lambda n: self._put(self.bucket, n))

    def plain_files(self) -> float:
        """Copies one file after the other in a loop: reads, writes, syncs and renames it."""
        target = self._folder() / "t"

        def copy() -> None:
            for number in range(FILES):
                name = self._name(number)
                temporary = target / f"{name}.new"
                with temporary.open("wb") as file:
                    file.write((self.source / "t" / name).read_bytes())
                    file.flush()
                    os.fsync(file.fileno())
                temporary.rename(target / name)

        return self._judged(seconds(copy), target, FILES)

    def files(self) -> float:
        """Copies the files with the engine."""
        target = self._folder()
        took_s = self._copied(f"file://{self.source}", f"file://{target}")
        return self._judged(took_s, target / "t", FILES)

    def boto3_up(self) -> float:
        """Uploads the objects with boto3 in ten threads."""
        bucket = self._bucket()
        return seconds(lambda: self._each(lambda n: self._put(bucket, n)))

    def up(self) -> float:
        """Uploads the objects with mizzen's copy engine."""
        return self._copied(f"file://{self.few}", f"s3://{self._bucket()}")

    def boto3_down(self) -> float:
        """Downloads the objects into files with boto3 in ten threads."""
        target = self._folder() / "t"

        def get(number: int) -> None:
            name = self._name(number)
            (target / name).write_bytes(self.client.get_object(Bucket=self.bucket, Key=f"t/{name}")["Body"].read())

        return self._judged(seconds(lambda: self._each(get)), target, OBJECTS)

    def down(self) -> float:
        """Downloads the objects with the engine."""
        target = self._folder()
        return self._judged(self._copied(f"s3://{self.bucket}", f"file://{target}"), target / "t", OBJECTS)

    def boto3_within(self) -> float:
        """Copies the objects within the server with boto3 in ten threads."""
        bucket = self._bucket()

        def copy(number: int) -> None:
            key = f"t/{self._name(number)}"
            self.client.copy_object(Bucket=bucket, Key=key, CopySource={"Bucket": self.bucket, "Key": key})

        return seconds(lambda: self._each(copy))

    def within(self) -> float:
        """Copies the objects within the server with the engine."""
        return self._copied(f"s3://{self.bucket}", f"s3://{self._bucket()}")

    def _copied(self, source_url: str, target_url: str) -> float:
        source, target = open_copy_store(source_url), open_copy_store(target_url)
        return seconds(lambda: copy_prefix(source, target, "t/", name="bench"))

    def _put(self, bucket: str, number: int) -> None:
        name = self._name(number)
        self.client.put_object(Bucket=bucket, Key=f"t/{name}", Body=(self.few / "t" / name).read_bytes())

    def _each(self, one: Callable[[int], object]) -> None:
        with ThreadPoolExecutor(THREADS) as pool:
            list(pool.map(one, range(OBJECTS)))

    def _judged(self, took_s: float, target: Path, count: int) -> float:
        """Checks the copies and returns `took_s`; removes the copies, so that all rounds have an equally full disk."""
        wrong = [p for p in target.iterdir() if p.read_bytes() != (self.source / "t" / p.name).read_bytes()]
        if wrong or len(list(target.iterdir())) != count:
            raise InvalidBenchmark(f"{target}: not all of the {count} objects were copied correctly")
        shutil.rmtree(target.parent)
        return took_s

    def _folder(self) -> Path:
        folder = self.root / uuid4().hex
        (folder / "t").mkdir(parents=True)
        return folder

    def _bucket(self) -> str:
        name = f"bench-{uuid4().hex[:12]}"
        self.client.create_bucket(Bucket=name)
        return name

    @staticmethod
    def _name(number: int) -> str:
        return f"{number:05d}"


def run(bench: Bench) -> Iterator[Figure]:
    """Runs the suite, and yields the figures of all lines."""
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=Path.cwd()) as folder, _s3() as url:
        rounds = _Rounds(Path(folder), url)
        ways = {
            "files": (rounds.plain_files, rounds.files, FILES),
            "S3, up": (rounds.boto3_up, rounds.up, OBJECTS),
            "S3, down": (rounds.boto3_down, rounds.down, OBJECTS),
            "S3, within": (rounds.boto3_within, rounds.within, OBJECTS),
        }
        for line in LINES:
            plain, ours, count = ways[line.name]
            found = medians(interleave(bench, {"plain_s": plain, "ours_s": ours}))
            sizes = {
                "objects": count,
                "object_bytes": OBJECT_BYTES,
                "plain_threads": 1 if plain == rounds.plain_files else THREADS,
            }
            yield Figure(SUITE.name, line, found["plain_s"] / found["ours_s"], found, bench.rounds, sizes)


SUITE = Suite("copies", LINES, run)
