"""Events of pods that an API server does not deliver, although it delivers lists."""

import contextlib
import json
import socket
from pathlib import Path

from capacity.providers.kubernetes.api import KubernetesApi
from capacity.providers.kubernetes.pod_ends import PodEnds
from capacity.providers.kubernetes.settings import ClusterAccess


def test_events_that_hang_hold_up_one_request_only(tmp_path: Path) -> None:
    """Many pods that are being deleted cost one timeout, not one each: all pools wait for a provider's list."""
    with socket.create_server(("127.0.0.1", 0)) as server:  # It accepts connections, and never answers.
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        (config := tmp_path / "kubeconfig").write_text(
            json.dumps(
                {
                    "clusters": [{"name": "c", "cluster": {"server": url}}],
                    "contexts": [{"name": "c", "context": {"cluster": "c", "user": "u"}}],
                    "current-context": "c",
                    "users": [{"name": "u", "user": {"token": "t"}}],
                }
            )
        )
        api = KubernetesApi("k8s", ClusterAccess(kubeconfig=config, timeout_s=0.2), "pods")
        ends = PodEnds("k8s", api, "")
        pods = [{"metadata": {"name": f"in-{k}", "uid": f"u{k}", "labels": {}}, "status": {}} for k in range(5)]
        assert {ends.why_deleted(pod) for pod in pods} == {"Deleted: the pod was deleted or evicted"}
        api.close()
        server.setblocking(False)
        connections = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                server.accept()[0].close()
                connections += 1
    assert connections == 1
