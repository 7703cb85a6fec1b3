"""A container engine and a registry of the tests. Skips where the machine has none."""

import contextlib
import hashlib
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from bench import container_engine
from bench.container_engine import DockerHere
from infra.stack.ports import free_port

_STARTED_S = 60.0


@contextlib.contextmanager
def dockerd(*options: str) -> Iterator[DockerHere]:
    """Runs dockerd, or skips the test where it cannot run."""
    with contextlib.ExitStack() as running:
        try:
            here = running.enter_context(container_engine.dockerd(*options))
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


@contextlib.contextmanager
def registry(folder: Path) -> Iterator[str]:
    """Runs a registry on loopback, and yields its `HOST:PORT`."""
    program = shutil.which("docker-registry") or shutil.which("registry")
    if program is None:
        pytest.skip("docker-registry is not installed")
    port = free_port()
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / "registry.yml"
    config.write_text(
        f"version: 0.1\nstorage: {{filesystem: {{rootdirectory: {folder}/data}}}}\nhttp: {{addr: 127.0.0.1:{port}}}\n"
    )
    with open(folder / "registry.log", "ab") as log:
        process = subprocess.Popen([program, "serve", str(config)], stdout=log, stderr=log)
    try:
        give_up_s = time.monotonic() + _STARTED_S
        while True:
            with contextlib.suppress(urllib.error.URLError, ConnectionError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/", timeout=5).close()
                break
            assert process.poll() is None, (folder / "registry.log").read_text()
            assert time.monotonic() < give_up_s, "the registry does not answer"
            time.sleep(0.05)
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()
