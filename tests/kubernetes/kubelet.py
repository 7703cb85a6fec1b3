"""A stand-in for kubelets: a Node object for each node, and processes in the place of containers.

A container is its command in a PID namespace, below a first process that reaps, as in a pod that shares its process
namespace. The `emptyDir` of the agent is mounted. There are no images, networks and cgroups: an image is known or not,
all pods have the address 127.0.0.1, and processes have no limits.
"""

import base64
import contextlib
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from capacity.providers.kubernetes.settings import AGENT
from tests.kubernetes.cluster import NAMESPACE, KubernetesCluster, pod_path

IMAGE = "mizzen:test"
_PORTS_EACH, _RANGES = 40, 250
_PAUSE = """
import os, sys
child = os.fork()
if child == 0:
    os.execvp(sys.argv[1], sys.argv[1:])
while (ended := os.wait())[0] != child:
    pass
code = os.waitstatus_to_exitcode(ended[1])
sys.exit(128 - code if code < 0 else code)
"""
_MOUNT = 'mkdir -p "$1"; mount --bind "$2" "$1"; shift 2; exec "$@"'


class _Container:
    """The processes of a pod."""

    def __init__(
        self, pod: dict[str, Any], environ: dict[str, str], folder: Path, files: dict[str, dict[str, str]]
    ) -> None:
        """`files`: the content of each file of each volume that is a ConfigMap."""
        self.pod, self.killed, self.oom = pod, False, False
        (agent,) = [one for one in pod["spec"]["containers"] if one["name"] == AGENT]
        folder.mkdir()
        command = [sys.executable, "-c", _PAUSE, *agent["command"]]
        for mount in agent.get("volumeMounts", []):
            if (name := mount["name"]) in ("mizzen-state", *files):
                (volume := folder / name.removeprefix("mizzen-")).mkdir()
                for file, content in files.get(name, {}).items():
                    (volume / file).write_text(content)
                command = ["sh", "-c", _MOUNT, "sh", mount["mountPath"], str(volume), *command]
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", *command],
                env=environ, stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        self.log = folder / "log"

    def agent(self) -> int | None:
        """Returns the process id of the container's command on this computer."""
        found = self.process.pid
        for _ in range(2):
            children = Path(f"/proc/{found}/task/{found}/children")
            with contextlib.suppress(OSError):
                below = children.read_text().split()
                if not below:
                    return None
                found = int(below[0])
        return found

    def kill(self) -> None:
        self.killed = True
        self.process.kill()


class Nodes:
    """The nodes of a cluster, served by one thread."""

    def __init__(self, cluster: KubernetesCluster, folder: Path) -> None:
        self._cluster, self._folder = cluster, folder
        self._names: dict[str, bool] = {}
        self.containers: dict[str, _Container] = {}
        self.started: Counter[str] = Counter()
        """How many containers were started for pods of each name."""
        self._ports = random.SystemRandom().randrange(_RANGES)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def add(self, name: str, gpus: int = 2, cpus: int = 4, memory: str = "4Gi", **labels: str) -> None:
        """Adds a node; it is ready at once."""
        body = {"metadata": {"name": name, "labels": labels}}
        self._cluster.call("POST", "/api/v1/nodes", body)
        amounts = {"cpu": str(cpus), "memory": memory, "pods": "100", "nvidia.com/gpu": str(gpus)}
        self._cluster.patch(f"/api/v1/nodes/{name}/status", {"status": {"capacity": amounts, "allocatable": amounts}})
        self._names[name] = True
        self._beat(name)

    def silence(self, name: str, *, kill: bool = False) -> None:
        """Stops the heartbeats of a node and what it does for its pods; `kill`: its containers die, too."""
        self._names[name] = False
        for container in list(self.containers.values()):
            if kill and container.pod["spec"]["nodeName"] == name:
                container.kill()

    def resume(self, name: str) -> None:
        """Starts them again."""
        self._names[name] = True

    def oom(self, name: str) -> None:
        """Ends the container of a pod as the kernel does if it uses more memory than its limit."""
        self.containers[name].oom = True
        self.containers[name].process.kill()

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stops the thread, and kills all containers.

        Raises:
            AssertionError: the thread had ended, so the nodes did nothing any more.
        """
        alive = self._thread.is_alive()
        self._closed.set()
        self._thread.join()
        for container in self.containers.values():
            container.kill()
            container.process.wait()
        assert alive, "the nodes have failed"

    def _run(self) -> None:
        beat_s = 0.0
        while not self._closed.wait(0.3):
            with contextlib.suppress(AssertionError, httpx.HTTPError):
                if time.monotonic() > beat_s + 1.5:
                    beat_s = time.monotonic()
                    for name in [name for name, beats in self._names.items() if beats]:
                        self._beat(name)
                self._serve()

    def _beat(self, name: str) -> None:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "", "lastHeartbeatTime": now}
        self._cluster.patch(f"/api/v1/nodes/{name}/status", {"status": {"conditions": [ready]}})

    def _serve(self) -> None:
        pods = self._cluster.pods()
        for name, container in list(self.containers.items()):
            there = name in pods and pods[name]["metadata"]["uid"] == container.pod["metadata"]["uid"]
            if not there and self._names[container.pod["spec"]["nodeName"]]:
                del self.containers[name]
                container.kill()
                container.process.wait()
        for name, pod in pods.items():
            if self._names.get(pod["spec"].get("nodeName", ""), False):
                self._serve_pod(name, pod)

    def _serve_pod(self, name: str, pod: dict[str, Any]) -> None:
        container = self.containers.get(name)
        deleted = pod["metadata"].get("deletionTimestamp")
        if container is None:
            if deleted is not None:
                self._remove(pod)
            elif pod["status"]["phase"] == "Pending":
                self._start(name, pod)
        elif (code := container.process.poll()) is not None:
            if pod["status"]["phase"] in ("Pending", "Running"):
                self._ended(pod, container, code)
            if deleted is not None:
                self._remove(pod)
                del self.containers[name]
        elif deleted is not None:
            self._stop(container, datetime.fromisoformat(deleted).timestamp())
        elif pod["status"]["phase"] == "Pending":  # The API server did not answer when the container was started.
            self._runs(pod)

    def _stop(self, container: _Container, at_s: float) -> None:
        if time.time() >= at_s:
            container.kill()
        elif not container.killed and (agent := container.agent()) is not None:
            container.killed = True
            os.kill(agent, signal.SIGTERM)

    def _remove(self, pod: dict[str, Any]) -> None:
        uid = {"uid": pod["metadata"]["uid"]}
        body = {"gracePeriodSeconds": 0, "preconditions": uid}
        self._cluster.call("DELETE", pod_path(pod["metadata"]["name"]), body)

    def _start(self, name: str, pod: dict[str, Any]) -> None:
        (agent,) = [one for one in pod["spec"]["containers"] if one["name"] == AGENT]
        if agent["image"] != IMAGE:
            words = f'Back-off pulling image "{agent["image"]}"'
            self._say(pod, "Pending", {"waiting": {"reason": "ImagePullBackOff", "message": words}})
            return
        environ = self._environ(pod, agent)
        if environ is None:
            self._say(pod, "Pending", {"waiting": {"reason": "CreateContainerConfigError", "message": "no secret"}})
            return
        maps = {one["name"]: one["configMap"]["name"] for one in pod["spec"].get("volumes", []) if "configMap" in one}
        path = f"/api/v1/namespaces/{NAMESPACE}/configmaps"
        files = {volume: self._cluster.call("GET", f"{path}/{name}")["data"] for volume, name in maps.items()}
        self.containers[name] = _Container(pod, environ, self._folder / pod["metadata"]["uid"], files)
        self.started[name] += 1
        self._runs(pod)

    def _runs(self, pod: dict[str, Any]) -> None:
        self._say(pod, "Running", {"running": {"startedAt": _now()}})

    def _environ(self, pod: dict[str, Any], agent: dict[str, Any]) -> dict[str, str] | None:
        """Returns the environment of a container; None: a Secret is missing."""
        fields = {"metadata.uid": pod["metadata"]["uid"], "status.podIP": "127.0.0.1"}
        self._ports += 1
        first = 20_000 + _PORTS_EACH * (self._ports % _RANGES)
        out = {"PATH": os.environ["PATH"], "HOME": "/root", "TEST_PORTS": f"{first}-{first + _PORTS_EACH - 1}"}
        for one in agent.get("env", []):
            source = one.get("valueFrom", {})
            if "secretKeyRef" in source:
                of = source["secretKeyRef"]
                try:
                    secret = self._cluster.call("GET", f"/api/v1/namespaces/{NAMESPACE}/secrets/{of['name']}")
                except AssertionError:
                    return None
                out[one["name"]] = base64.b64decode(secret["data"][of["key"]]).decode()
            elif "fieldRef" in source:
                out[one["name"]] = fields[source["fieldRef"]["fieldPath"]]
            else:
                value = str(one["value"])
                for name, known in out.items():
                    value = value.replace(f"$({name})", known)
                out[one["name"]] = value
        return out

    def _ended(self, pod: dict[str, Any], container: _Container, code: int) -> None:
        code = 128 - code if code < 0 else code
        reason = "OOMKilled" if container.oom else "Error" if code else "Completed"
        tail = container.log.read_text(errors="replace")[-1500:] if code else ""
        state = {"exitCode": code, "reason": reason, "message": tail, "finishedAt": _now()}
        self._say(pod, "Failed" if code else "Succeeded", {"terminated": state})

    def _say(self, pod: dict[str, Any], phase: str, state: dict[str, Any]) -> None:
        running = "running" in state
        of = {"name": AGENT, "state": state, "ready": running, "restartCount": 0, "image": "", "imageID": ""}
        others = [one for one in pod["status"].get("conditions", []) if one["type"] != "Ready"]
        ready = {"type": "Ready", "status": str(running), "lastTransitionTime": _now()}
        status = {"phase": phase, "containerStatuses": [of], "podIP": "127.0.0.1", "conditions": [*others, ready]}
        self._cluster.patch(f"{pod_path(pod['metadata']['name'])}/status", {"status": status})


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@contextlib.contextmanager
def nodes(cluster: KubernetesCluster, count: int) -> Iterator[Nodes]:
    """Yields nodes `n1` to `nN`."""
    (folder := cluster.folder / "pods").mkdir()
    made = Nodes(cluster, folder)
    for number in range(1, count + 1):
        made.add(f"n{number}")
    made.start()
    try:
        yield made
    finally:
        made.stop()
