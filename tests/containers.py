"""A container engine and a registry of the tests. Skips where the machine has none."""

import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import tarfile
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import httpx
import pytest

from bench import container_engine
from bench.container_engine import DockerHere
from infra.stack.ports import free_port

_STARTED_S = 60.0
_PIECE_BYTES = 1 << 20
_PODMAN = os.environ.get("MIZZEN_TEST_ENGINE") == "podman"


@contextlib.contextmanager
def dockerd(*options: str, cgroup: str | None = None) -> Iterator[DockerHere]:
    """Runs dockerd, or Podman if `MIZZEN_TEST_ENGINE` says so, in a cgroup v2. Skips the test where it cannot run."""
    with podman_here() if _PODMAN else _or_skip(container_engine.dockerd(*options, cgroup=cgroup)) as here:
        yield here


def podman_here() -> AbstractContextManager[DockerHere]:
    """Runs Podman. Skips the test where it cannot run."""
    return _or_skip(container_engine.podman())


@contextlib.contextmanager
def _or_skip(engine: AbstractContextManager[DockerHere]) -> Iterator[DockerHere]:
    with contextlib.ExitStack() as running:
        try:
            here = running.enter_context(engine)
        except container_engine.NoEngineError as error:
            pytest.skip(str(error))
        yield here


def push_manifest(host: str, repository: str, tag: str, content: str) -> str:
    """Puts a manifest without layers into a registry and returns its digest."""
    config = json.dumps({"architecture": "amd64", "os": "linux", "config": {"Labels": {"content": content}}}).encode()
    with httpx.Client(base_url=f"http://{host}/v2/{repository}") as client:
        digest = f"sha256:{hashlib.sha256(config).hexdigest()}"
        place = client.post("/blobs/uploads/").headers["location"]
        client.put(httpx.URL(place).copy_merge_params({"digest": digest}), content=config).raise_for_status()
        kind = "application/vnd.docker.distribution.manifest.v2+json"
        described = {
            "mediaType": "application/vnd.docker.container.image.v1+json", "size": len(config), "digest": digest
        }  # fmt: skip
        body = {"schemaVersion": 2, "mediaType": kind, "config": described, "layers": []}
        answer = client.put(f"/manifests/{tag}", content=json.dumps(body), headers={"Content-Type": kind})
        return str(answer.raise_for_status().headers["docker-content-digest"])


def push_large(host: str, repository: str, size_bytes: int) -> str:
    """Puts an image with one layer of zeros into a registry, and returns its name. It is made without a copy of it."""
    layer = tarfile.TarInfo("zeros")
    layer.size = size_bytes
    pieces = [layer.tobuf(), *[bytes(_PIECE_BYTES)] * -(-size_bytes // _PIECE_BYTES), bytes(2 * tarfile.BLOCKSIZE)]
    sha256 = hashlib.sha256()
    for piece in pieces:
        sha256.update(piece)
    config = {
        "architecture": "amd64", "os": "linux", "config": {"Cmd": ["/none"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{sha256.hexdigest()}"]},
    }  # fmt: skip
    text = json.dumps(config).encode()
    kind, docker = "application/vnd.docker.distribution.manifest.v2+json", "application/vnd.docker"
    with httpx.Client(base_url=f"http://{host}/v2/{repository}", timeout=300) as client:

        def put(content: Iterable[bytes], digest: str) -> str:
            place = httpx.URL(client.post("/blobs/uploads/").headers["location"])
            client.put(place.copy_merge_params({"digest": digest}), content=content).raise_for_status()
            return digest

        body = {
            "schemaVersion": 2, "mediaType": kind,
            "config": {
                "mediaType": f"{docker}.container.image.v1+json", "size": len(text),
                "digest": put([text], f"sha256:{hashlib.sha256(text).hexdigest()}"),
            },
            "layers": [{
                "mediaType": f"{docker}.image.rootfs.diff.tar.gzip", "size": sum(map(len, pieces)),
                "digest": put(pieces, f"sha256:{sha256.hexdigest()}"),
            }],
        }  # fmt: skip
        answer = client.put("/manifests/1", content=json.dumps(body), headers={"Content-Type": kind})
        return f"{host}/{repository}@{answer.raise_for_status().headers['docker-content-digest']}"


@contextlib.contextmanager
def registry(folder: Path, users: str | None = None) -> Iterator[str]:
    """Runs a registry on loopback, and yields its `HOST:PORT`. `users`: lines of htpasswd; None: it is open."""
    program = shutil.which("docker-registry") or shutil.which("registry")
    if program is None:
        pytest.skip("docker-registry is not installed")
    port = free_port()
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "registry.yml"
    text = (
        f"version: 0.1\nstorage: {{filesystem: {{rootdirectory: {folder}/data}}}}\nhttp: {{addr: 127.0.0.1:{port}}}\n"
    )
    if users is not None:
        (folder / "users").write_text(users)
        text += f"auth: {{htpasswd: {{realm: tests, path: {folder}/users}}}}\n"
    config.write_text(text)
    with open(folder / "registry.log", "ab") as log:
        process = subprocess.Popen([program, "serve", str(config)], stdout=log, stderr=log)
    try:
        give_up_s = time.monotonic() + _STARTED_S
        while True:
            with contextlib.suppress(httpx.TransportError):
                httpx.get(f"http://127.0.0.1:{port}/v2/", timeout=5)
                break
            assert process.poll() is None, (folder / "registry.log").read_text()
            assert time.monotonic() < give_up_s, "the registry does not answer"
            time.sleep(0.05)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()
