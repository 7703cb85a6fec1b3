"""A Kubernetes cluster on loopback: etcd and a real API server, scheduler and controller manager, on free ports.

`build-server.sh` builds the three. Nodes are stand-ins (`tests.kubernetes.kubelet`).
"""

import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from infra.stack.ports import free_port

CACHE = Path(os.environ.get("MIZZEN_KUBERNETES", Path.home() / ".cache" / "mizzen-kubernetes"))
PROGRAMS = ("kube-apiserver", "kube-controller-manager", "kube-scheduler")
NAMESPACE = "pods"
RBAC = Path(__file__).parents[2] / "deploy" / "kubernetes" / "rbac.yaml"
_ADMIN = "admin-token"


def missing() -> str | None:
    """Returns why no cluster can run on this computer; None: it can."""
    if any(not (CACHE / "bin" / program).exists() for program in PROGRAMS):
        return f"{CACHE}/bin has no kube-apiserver (make test-kubernetes builds it)"
    if shutil.which("etcd") is None:
        return "the program etcd is not installed (Debian: etcd-server)"
    return None if os.geteuid() == 0 else "pods of the stand-in for kubelets need root"


class KubernetesCluster:
    """The cluster, with the namespace `pods`, in which the user of `kubeconfig` has the rights of `rbac.yaml`."""

    def __init__(self, folder: Path, *, watch_cache: bool = True) -> None:
        """`watch_cache`: without it, a watch that was interrupted before `compact` has expired."""
        self.folder, self._watch_cache = folder, watch_cache
        self.port, self._etcd_port, self._peer_port = free_port(), free_port(), free_port()
        self.url = f"https://127.0.0.1:{self.port}"
        self.kubeconfig = folder / "mizzen.kubeconfig"
        self._http = httpx.Client(base_url=self.url, verify=False, timeout=20, trust_env=False)
        self._http.headers["authorization"] = f"Bearer {_ADMIN}"
        self._commands: dict[str, list[str]] = {}
        self._changing = threading.Lock()
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Starts all programs, and waits until the namespace can be used."""
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        (self.folder / "accounts.key").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM,
                serialization.PrivateFormat.TraditionalOpenSSL,
                serialization.NoEncryption(),
            )
        )
        (self.folder / "tokens").write_text(
            f'{_ADMIN},admin,admin,"system:masters"\nmizzen-token,mizzen,mizzen\n'
            "dispatcher-token,dispatcher,dispatcher\n"
        )
        self._write_kubeconfig(self.folder / "admin.kubeconfig", _ADMIN)
        self._write_kubeconfig(self.kubeconfig, "mizzen-token")
        self._write_kubeconfig(self.folder / "dispatcher.kubeconfig", "dispatcher-token")
        self._run(
            "etcd", "--data-dir", str(self.folder / "etcd"), "--unsafe-no-fsync",
            "--listen-client-urls", f"http://127.0.0.1:{self._etcd_port}",
            "--advertise-client-urls", f"http://127.0.0.1:{self._etcd_port}",
            "--listen-peer-urls", f"http://127.0.0.1:{self._peer_port}",
            "--initial-advertise-peer-urls", f"http://127.0.0.1:{self._peer_port}",
            "--initial-cluster", f"default=http://127.0.0.1:{self._peer_port}",
        )  # fmt: skip
        self.start_api()
        admin = str(self.folder / "admin.kubeconfig")
        self._run(
            "kube-controller-manager", f"--kubeconfig={admin}", "--leader-elect=false", "--port=0",
            f"--secure-port={free_port()}", "--bind-address=127.0.0.1", f"--cert-dir={self.folder}/cm",
            f"--service-account-private-key-file={self.folder}/accounts.key", "--node-monitor-period=1s",
            "--node-monitor-grace-period=6s", "--controllers=*,-ttl,-bootstrapsigner,-tokencleaner",
        )  # fmt: skip
        self._run(
            "kube-scheduler", f"--kubeconfig={admin}", "--leader-elect=false", "--port=0",
            f"--secure-port={free_port()}", "--bind-address=127.0.0.1", f"--cert-dir={self.folder}/sched",
        )  # fmt: skip
        self.call("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
        self.allow(RBAC, "mizzen")
        account = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/default"
        self.until(lambda: self.call("GET", account), "the namespace has its service account")

    def start_api(self) -> None:
        """Starts the API server, and waits until it is ready. It continues with the state of the previous one."""
        self._run(
            "kube-apiserver", f"--etcd-servers=http://127.0.0.1:{self._etcd_port}", f"--secure-port={self.port}",
            "--bind-address=127.0.0.1", f"--cert-dir={self.folder}/api", f"--token-auth-file={self.folder}/tokens",
            "--authorization-mode=RBAC", "--service-cluster-ip-range=10.0.0.0/24",
            f"--service-account-issuer={self.url}", f"--service-account-key-file={self.folder}/accounts.key",
            f"--service-account-signing-key-file={self.folder}/accounts.key", "--max-requests-inflight=400",
            f"--watch-cache={str(self._watch_cache).lower()}",
        )  # fmt: skip
        self.until(lambda: self._http.get("/readyz").status_code == 200, "the API server is ready", 120.0)

    def kill(self, program: str) -> None:
        """Kills a program."""
        with self._changing:
            process = self._processes.pop(program)
        process.kill()
        process.wait()

    def freeze(self, program: str, *, thaw: bool = False) -> None:
        """Stops a program, which then accepts connections and never answers; or lets it continue."""
        self._processes[program].send_signal(signal.SIGCONT if thaw else signal.SIGSTOP)

    def start_again(self, program: str) -> None:
        """Starts a program that was killed, and does not wait until it is ready."""
        self._run(program, *self._commands[program])

    def revive(self) -> None:
        """Starts programs again that have ended by themselves, as an init system does."""
        for program in list(self._processes):
            with self._changing:
                process = self._processes.get(program)
                if process is not None and process.poll() is not None:
                    self.start_again(program)

    def runs(self, program: str) -> bool:
        """Returns whether a program was started and not killed."""
        return program in self._processes

    def call(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> dict[str, Any]:
        """Sends a request of an administrator; returns the answer.

        Raises:
            AssertionError: it was refused.
        """
        answer = self._http.request(
            method, path, content=None if body is None else json.dumps(body), headers={"content-type": kind}
        )
        assert answer.status_code < 300, f"{method} {path}: {answer.status_code} {answer.text}"
        found: dict[str, Any] = answer.json()
        return found

    def patch(self, path: str, body: Any) -> dict[str, Any]:
        """Sends a merge patch."""
        return self.call("PATCH", path, body, "application/merge-patch+json")

    def pods(self) -> dict[str, dict[str, Any]]:
        """Returns the pods of the namespace by name."""
        found = self.call("GET", pod_path())["items"]
        return {one["metadata"]["name"]: one for one in found}

    def events(self, reason: str) -> list[dict[str, Any]]:
        """Returns the cluster's events with a reason."""
        found = self.call("GET", f"/api/v1/namespaces/{NAMESPACE}/events?fieldSelector=reason={reason}")["items"]
        return list(found)

    def evict(self, name: str, **more: Any) -> None:
        """Evicts a pod by the version of the Eviction API that the server has: policy/v1, or v1beta1 before 1.22.

        Raises:
            AssertionError: a PodDisruptionBudget does not allow it (429).
        """
        resources = self.call("GET", "/api/v1")["resources"]
        (found,) = [one for one in resources if one["name"] == "pods/eviction"]
        version = f"{found['group']}/{found['version']}"
        body = {"apiVersion": version, "kind": "Eviction", "metadata": {"name": name, "namespace": NAMESPACE}, **more}
        self.call("POST", f"{pod_path(name)}/eviction", body)

    def protect(self, name: str, least: int) -> str:
        """Creates a PodDisruptionBudget for all pods of mizzen; returns its path. From 1.21 on it is policy/v1."""
        group = self.call("GET", "/apis/policy")["preferredVersion"]["groupVersion"]
        selector = {"matchLabels": {"app.kubernetes.io/managed-by": "mizzen"}}
        body = {"metadata": {"name": name}, "spec": {"minAvailable": least, "selector": selector}}
        path = f"/apis/{group}/namespaces/{NAMESPACE}/poddisruptionbudgets"
        self.call("POST", path, body)
        self.until(lambda: self.call("GET", f"{path}/{name}")["status"]["currentHealthy"] >= least, "it is counted")
        return f"{path}/{name}"

    def status_as_mizzen(self, method: str, path: str, user: str = "mizzen") -> int:
        """Returns the status of the answer to a request with the rights of mizzen, or of its `dispatcher`."""
        return self._http.request(method, path, headers={"authorization": f"Bearer {user}-token"}).status_code

    def compact(self) -> None:
        """Forgets all versions of objects until now, so that earlier watches cannot be continued."""
        with httpx.Client(base_url=f"http://127.0.0.1:{self._etcd_port}", trust_env=False) as etcd:
            key = base64.b64encode(b"x").decode()
            revision = etcd.post("/v3/kv/put", json={"key": key, "value": key}).json()["header"]["revision"]
            etcd.post("/v3/kv/compaction", json={"revision": revision}).raise_for_status()

    def until(self, holds: Callable[[], Any], what: str, timeout_s: float = 60.0) -> Any:
        """Waits until `holds` returns a true value; returns it.

        Raises:
            AssertionError: it did not within `timeout_s`.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            with contextlib.suppress(AssertionError, httpx.HTTPError):
                if found := holds():
                    return found
            assert time.monotonic() < deadline_s, f"not within {timeout_s:.0f} s: {what}"
            time.sleep(0.2)

    def stop(self) -> None:
        """Ends all programs."""
        for program in ("kube-scheduler", "kube-controller-manager", "kube-apiserver", "etcd"):
            if program in self._processes:
                self.kill(program)
        self._http.close()

    def allow(self, rbac: Path, user: str) -> None:
        """Gives a user the rights that a manifest gives to its service account."""
        for body in yaml.safe_load_all(rbac.read_text()):
            group = "" if body["apiVersion"] == "v1" else body["apiVersion"]
            if body["kind"].endswith("RoleBinding"):
                body["subjects"] = [{"kind": "User", "name": user, "apiGroup": group.partition("/")[0]}]
            root = f"/apis/{group}" if group else "/api/v1"
            where = root if body["kind"].startswith("Cluster") else f"{root}/namespaces/{NAMESPACE}"
            self.call("POST", f"{where}/{body['kind'].lower()}s", body)

    def kubeconfig_at(self, url: str, user: str = "mizzen") -> Path:
        """Returns a kubeconfig of mizzen, or of its `dispatcher`, for a server in between."""
        self._write_kubeconfig(path := self.folder / f"{url.rpartition(':')[2]}.kubeconfig", f"{user}-token", url)
        return path

    def _write_kubeconfig(self, path: Path, token: str, url: str | None = None) -> None:
        cluster = {"server": url or self.url, "insecure-skip-tls-verify": True}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "c",
            "clusters": [{"name": "c", "cluster": cluster}],
            "users": [{"name": "u", "user": {"token": token}}],
            "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
        }
        path.write_text(yaml.safe_dump(config))
        path.chmod(0o600)

    def _run(self, program: str, *arguments: str) -> None:
        built = CACHE / "bin" / program
        path = str(built) if built.exists() else program
        self._commands[program] = list(arguments)
        with (self.folder / f"{program}.log").open("ab") as log:
            self._processes[program] = subprocess.Popen(
                [path, *arguments], stdout=log, stderr=log, cwd=self.folder, start_new_session=True
            )


def pod_path(name: str = "") -> str:
    """Returns the path of the pods of the namespace, or of one of them."""
    return f"/api/v1/namespaces/{NAMESPACE}/pods" + (f"/{name}" if name else "")


@contextlib.contextmanager
def cluster(**options: Any) -> Iterator[KubernetesCluster]:
    """Yields a running cluster without nodes in a new temporary folder."""
    folder = Path(tempfile.mkdtemp(prefix="k8s-"))
    folder.chmod(0o755)
    made = KubernetesCluster(folder, **options)
    try:
        made.start()
        yield made
    finally:
        made.stop()
        shutil.rmtree(folder, ignore_errors=True)
