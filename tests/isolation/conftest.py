"""Stacks with each mode of isolation, and with a container engine."""

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from agent.isolation import TENANT_UIDS, why_not
from domain.isolation import Isolation
from tests.containers import DockerHere, dockerd, registry
from tests.stack.harness import ROOT, BareUp, Up

PATIENCE_S = 300.0
"""Several tests at once, on machines with two cores."""
LOG_BYTES, OUTPUT_BYTES = 8 << 20, 4 << 20
"""Limits on the output of a task, in the bucket and on its machine."""
FLEET = """
version: 1
regions:
  - name: west
    clusters:
      - {name: c, machines: [{name: m, gpus: 2, gpu_type: a100, cpus: 2, memory: 2GiB}]}
"""


class Engine(NamedTuple):
    """A container engine, a registry on loopback, and an image in it."""

    docker: DockerHere
    host: str
    image: str


@pytest.fixture(scope="module")
def engine(mode: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine | None]:
    """A container engine and an image in a registry, in which the tasks use the machine's programs."""
    if mode != "container":
        yield None
        return
    with dockerd() as docker, registry(tmp_path_factory.mktemp("registry")) as host:
        docker.load(image := f"{host}/bare:1", bare=True)
        docker.docker("push", image)
        docker.docker("rmi", image)
        yield Engine(docker, host, image)


@pytest.fixture(scope="module")
def folder(mode: str) -> Iterator[Path]:
    """A folder of each mode, through which other users can go, as they must to run as a tenant without a sandbox."""
    with tempfile.TemporaryDirectory(prefix="mz-attacked-", ignore_cleanup_errors=True) as name:
        Path(name).chmod(0o711)
        yield Path(name)


@pytest.fixture(scope="module")
def stack(mode: str, engine: Engine | None, folder: Path) -> Iterator[Up]:
    """A stack with two tenants, which it separates."""
    tasks: dict[str, Any] = {"isolation": mode.partition(" ")[0], "disk_fraction": 0.01}
    tasks |= {"log_bytes": LOG_BYTES, "output_bytes": OUTPUT_BYTES}
    if engine is not None:
        paths = dict.fromkeys(str(Path(path).resolve()) for path in ("/usr", ROOT, sys.base_prefix))
        tasks |= {
            "isolation": "sandbox", "container_engine": str(engine.docker.socket), "paths": list(paths),
            "registries": [f"http://{engine.host}"],
        }  # fmt: skip
    if (why := why_not(Isolation(tasks["isolation"]), folder, TENANT_UIDS[0])) is not None:
        pytest.skip(why)
    up = (BareUp if mode.endswith("of an ordinary user") else Up)(folder, FLEET)
    config = up.folder / "config.yaml"
    replaced = ("tasks:",) if mode.startswith("none") else ("tasks:", "trust_tenants:")
    kept = [line for line in config.read_text().splitlines() if not line.startswith(replaced)]
    config.write_text("\n".join([*kept, f"tasks: {json.dumps(tasks)}"]) + "\n")
    try:
        up.start(timeout_s=PATIENCE_S)
        for tenant in ("victim", "intruder"):
            up.client().set_tenant(tenant, 3, {"a100": 1}, None)
        yield up
    finally:
        up.close()


def submit(up: Up, tenant: str, run: str, image: str | None, tasks: int = 1, **more: Any) -> str:
    """Submits a workload with one job of small tasks and the fields `more`, and returns its id."""
    job = {"name": "main", "tasks": tasks, "resources": {"cpus": 0.5, "memory": "512MiB"}, "run": run}
    if image is not None:  # It has no Python of its own.
        job |= {"image": image, "run": run.replace("$MIZZEN_PYTHON", sys.executable)}
    document = {"version": 1, "name": tenant, "tenant": tenant, "jobs": [job], "limits": {"retries": 0}, **more}
    return str(up.client().submit(document)["id"])
