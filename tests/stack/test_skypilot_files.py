"""A service file of SkyPilot on a whole stack: its files, its secrets and its repository reach the replica."""

import os
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from infra.stack.ports import free_port
from mizzen.cli.app import run
from mizzen.objects import open_store
from tests.stack.harness import Up, wait_until

_FLEET = f"""
version: 1
regions:
  - name: east
    clusters:
      - name: a
        machines: [{{name: m, count: 1, cpus: 8, memory: 8GiB, owner: "{os.getuid()}"}}]
"""
_TOKEN = "hf_not-a-name"
_RUN = """\
echo "$HF_TOKEN" > token.txt
cp /models/base/weights.bin /etc-like/app.conf sub/own.txt copied/
exec "$MIZZEN_PYTHON" -m http.server $PORT
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
    (folder / "version.txt").write_text("release")
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "second"], check=True)
    subprocess.run([*git, "checkout", "-q", "main"], check=True)
    return f"file://{folder}"


@pytest.mark.skipif(os.geteuid() != 0, reason="sandboxes of tenants need an agent that runs as root")
def test_files_secrets_and_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, s3_url: str) -> None:
    """The replica has the branch, local files, a folder of a bucket at an absolute path, and the secret."""
    open_store(s3_url).put("base/weights.bin", b"weights")
    (tmp_path / "app.conf").write_text("from a local file")
    port = free_port()
    document: dict[str, Any] = {
        "service": {"readiness_probe": "/token.txt", "replicas": 1},
        "resources": {"cpus": "1+", "memory": "0.5+", "ports": port, "labels": {"team": "lm"}},
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
    try:
        up.start(timeout_s=400)
        client = up.client()
        client.set_tenant("t", 3, {}, None)
        monkeypatch.setenv("MIZZEN_API", f"http://127.0.0.1:{up.port}")
        monkeypatch.setenv("MIZZEN_API_KEY", (up.data / "operator.key").read_text().strip())
        assert run(["serve", "up", str(file), "--tenant", "t", "--wait"]) == 0
        made = client.service("chat")
        (replica,) = made["replicas"]
        at = f"http://{replica['address']}:{replica['port']}"
        got = {name: httpx.get(f"{at}/{name}").text for name in (
            "version.txt", "token.txt", "copied/weights.bin", "copied/app.conf", "copied/own.txt")}  # fmt: skip
        assert got == {
            "version.txt": "release", "token.txt": f"{_TOKEN}\n", "copied/weights.bin": "weights",
            "copied/app.conf": "from a local file", "copied/own.txt": "from a local file",
        }  # fmt: skip
        told = repr((made, client.workload(replica["workload"]), list(client.events())))
        assert _TOKEN not in told
        names = client.secrets("t")
        assert sorted(name.rpartition("-")[0] for name in names) == ["chat-aws-secret-access-key", "chat-hf-token"]
        client.end_service("chat")
        wait_until(lambda: not client.secrets("t"), "the service has ended, with its secrets")
    finally:
        up.close()
