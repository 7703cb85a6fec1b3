"""Commands about services, with the real API. The service's workflow is not running: its rows are written here."""

import json
from pathlib import Path

import yaml

from infra.db.services import ServiceReplica, ServiceRow
from infra.db.session import transaction
from mizzen.cli.app import run
from tests.cli.service import Capture, Service

SKYPILOT = """
service:
  readiness_probe: /health
  replicas: 2
resources: {accelerators: "A100:1", ports: 8080, disk_size: 100}
run: python serve.py
"""


def test_services_from_up_to_down(as_vision: Service, capsys: Capture, tmp_path: Path) -> None:
    """A SkyPilot file gets its file's name; status shows the service; update makes a version; down ends it."""
    file = tmp_path / "My chat.yaml"
    file.write_text(SKYPILOT)
    assert run(["serve", "up", str(file)]) == 0
    shown = capsys.readouterr()
    assert "my-chat" in shown.out and "disk_size" in shown.err
    assert run(["serve", "up", str(file)]) == 5
    assert "exists" in capsys.readouterr().err
    file.write_text(SKYPILOT + "name: my-chat\n")
    assert run(["serve", "update", "my-chat", str(file), "--blue-green", "-o", "json"]) == 0
    [changed] = json.loads(capsys.readouterr().out)
    assert (changed["version"], changed["update_mode"]) == (2, "blue_green")
    with transaction(as_vision.engine) as session:
        session.get_one(ServiceRow, changed["id"]).target = 2
        session.add(
            ServiceReplica(
                service=changed["id"], number=0, version=2, workload="wl-0000000000000000", kind="on_demand",
                is_base=True, probe_error="status 503",
            )
        )  # fmt: skip
    assert run(["serve", "status"]) == run(["serve", "status", "my-chat"]) == 0
    out = capsys.readouterr().out
    assert "0/2" in out and "probe: status 503" in out and "on-demand" in out
    assert run(["serve", "logs", "my-chat", "7"]) == 3
    assert "has no replica 7" in capsys.readouterr().err
    assert run(["serve", "down", "my-chat", "other"]) == 3
    shown = capsys.readouterr()
    assert "stopping" in shown.out and "other" in shown.err


def test_wrong_files_are_refused(as_vision: Service, capsys: Capture, tmp_path: Path) -> None:
    """The error names the file, the field and the value; nothing is created."""
    file = tmp_path / "chat.yaml"
    for text, complaint in (
        (yaml.safe_dump({"service": {"replicas": 0.5}, "run": "x"}), "service.replicas"),
        (SKYPILOT + "file_mounts: {/a: s3://b}\n", "file_mounts"),
        ("a: 1\n---\nb: 2\n", "2 documents"),
        ("{", "chat.yaml"),
    ):
        file.write_text(text)
        assert run(["serve", "up", str(file)]) == 2
        assert complaint in capsys.readouterr().err
    assert run(["serve", "up", str(tmp_path / "missing.yaml")]) == 2
    assert run(["serve", "status", "chat"]) == 3
