"""A service file of SkyPilot on a whole stack: its files, its secrets and its repository reach the replica."""

import os
import ssl
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from infra.stack.ports import free_port
from mizzen.objects import open_store
from mizzen_client.cli.app import run
from rigs.demos.serving.installation import Balancer
from tests.proxies.gateway.site import certificate
from tests.stack.harness import Up, wait_until

pytestmark = [pytest.mark.stack, pytest.mark.timeout(600)]
_FLEET = f"""
version: 1
regions:
  - name: east
    clusters:
      - name: a
        machines: [{{name: m, count: 2, cpus: 8, memory: 8GiB, owner: "{os.getuid()}"}}]
"""
_TOKEN = "hf_not-a-name"
_SERVER = """\
import http.server, os, sys

class Handler(http.server.SimpleHTTPRequestHandler):
    def do_GET(self):
        if self.headers["Authorization"] != "Bearer " + os.environ["HF_TOKEN"]:
            return self.send_error(401)
        return super().do_GET()

http.server.ThreadingHTTPServer(("", int(sys.argv[1])), Handler).serve_forever()
"""
_RUN = """\
cp /models/base/weights.bin /etc-like/app.conf sub/own.txt copied/
echo "$SKYPILOT_NODE_IPS" > copied/nodes.txt
[ "$SKYPILOT_NODE_RANK" = 0 ] || exec sleep 3600
exec "$MIZZEN_PYTHON" server.py $PORT
"""


def _repository(folder: Path) -> str:
    """Makes a git repository with a branch, and returns its URL."""
    (folder / "copied").mkdir(parents=True)
    (folder / "copied/keep").write_text("")
    git = ["git", "-C", str(folder), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for words in (
        ["init", "-q", "-b", "main"], ["add", "."], ["commit", "-q", "-m", "first"],
        ["checkout", "-q", "-b", "release"],
    ):  # fmt: skip
        subprocess.run([*git, *words], check=True)
    (folder / "server.py").write_text(_SERVER)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "second"], check=True)
    subprocess.run([*git, "checkout", "-q", "main"], check=True)
    return f"file://{folder}"


@pytest.mark.long
@pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes of tenants need an agent that runs as root")
def test_a_file_of_skypilot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3_url: str) -> None:
    """A replica of two machines has the branch, local files, a folder of a bucket at an absolute path, and the secret.

    Its probe has the secret in a header, and its clients use TLS through a balancer.
    """
    open_store(s3_url).put("base/weights.bin", b"weights")
    (tmp_path / "app.conf").write_text("from a local file")
    pair = certificate(tmp_path)
    port = free_port()
    document: dict[str, Any] = {
        "service": {
            "readiness_probe": {"path": "/copied/nodes.txt", "headers": {"Authorization": "Bearer $HF_TOKEN"}},
            "replicas": 1,
            "tls": {"certfile": pair.chain.name, "keyfile": str(pair.key)},
        },
        "num_nodes": 2,
        "resources": {"cpus": "5+", "memory": "0.5+", "ports": port, "labels": {"team": "lm"}},
        "workdir": {"url": _repository(tmp_path / "repository"), "ref": "release"},
        "file_mounts": {
            "/models": {"source": s3_url, "mode": "COPY"},
            "/etc-like/app.conf": "app.conf",
            "~/sub/own.txt": "./app.conf",
        },
        "envs": {
            "PORT": port,
            **{name: os.environ[name] for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID", "AWS_DEFAULT_REGION")},
        },
        "secrets": {"HF_TOKEN": _TOKEN, "AWS_SECRET_ACCESS_KEY": os.environ["AWS_SECRET_ACCESS_KEY"]},
        "run": _RUN,
    }
    file = tmp_path / "chat.yaml"
    file.write_text(yaml.safe_dump(document))
    up = Up(tmp_path / "stack", fleet=_FLEET)
    settings = up.folder / "config.yaml"
    settings.write_text(settings.read_text().replace("isolation: none", "isolation: sandbox"))
    balancer = None
    try:
        up.start(timeout_s=300)
        client = up.client()
        client.set_tenant("t", 3, {}, None)
        monkeypatch.setenv("MIZZEN_API", client.url)
        monkeypatch.setenv("MIZZEN_API_KEY", (up.data / "operator.key").read_text().strip())
        assert run(["serve", "up", str(file), "--tenant", "t", "--wait"]) == 0
        made = client.service("chat")
        (replica,) = made["replicas"]
        key = client.create_key("balancer", "t")["key"]
        balancer = Balancer(tmp_path, client.url, key, ("chat",))
        balancer.start()
        at = f"https://127.0.0.1:{balancer.ports['chat']}"
        with httpx.Client(base_url=at, verify=ssl.create_default_context(cafile=str(pair.chain))) as http:
            wait_until(lambda: http.get("/").status_code == 401, "the balancer has a replica")
            http.headers["Authorization"] = f"Bearer {_TOKEN}"
            files = ("weights.bin", "app.conf", "own.txt", "nodes.txt")
            assert [http.get(f"/copied/{name}").text for name in files] == [
                "weights", "from a local file", "from a local file", "127.0.0.1\n127.0.0.1\n",
            ]  # fmt: skip
        told = repr((made, client.workload(replica["workload"]), list(client.events())))
        assert _TOKEN not in told and "PRIVATE KEY" not in told
        kept = sorted(name.rpartition("-")[0] for name in client.secrets("t"))
        assert kept == ["chat-aws-secret-access-key", "chat-hf-token", "chat-tls"]
        client.end_service("chat")
        wait_until(lambda: not client.secrets("t"), "the service has ended, with its secrets")
    finally:
        if balancer is not None:
            balancer.close()
        up.close()
