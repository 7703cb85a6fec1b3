"""Commands about services, with the real API. The service's workflow is not running: its rows are written here."""

import json
from pathlib import Path

import httpx
import yaml
from sqlalchemy import func

from infra.db.services import ServiceReplica, ServiceRow
from infra.db.session import transaction
from mizzen_client.cli.app import run
from tests.cli.service import Capture, Service, Submit

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
    file = tmp_path / "refused.yaml"
    for text, complaint in (
        (yaml.safe_dump({"service": {"replicas": 0.5}, "run": "x"}), "service.replicas"),
        (SKYPILOT + "file_mounts: {/a: s3://b}\n", "file_mounts"),
        ("a: 1\n---\nb: 2\n", "2 documents"),
        ("{", "refused.yaml"),
    ):
        file.write_text(text)
        assert run(["serve", "up", str(file)]) == 2
        assert complaint in capsys.readouterr().err
    assert run(["serve", "up", str(tmp_path / "missing.yaml")]) == 2
    assert run(["serve", "status", "refused"]) == 3


def test_logs_of_a_service_with_many_replicas(
    as_vision: Service, submit: Submit, capsys: Capture, tmp_path: Path
) -> None:
    """One replica, or all that have not ended and the newest others. Old replicas are neither read nor printed."""
    file = tmp_path / "many.yaml"
    file.write_text(SKYPILOT)
    assert run(["serve", "up", str(file), "-o", "json"]) == 0
    id_ = json.loads(capsys.readouterr().out)[0]["id"]
    workloads = {number: submit() for number in (3, 600, 601)}
    for number, workload in workloads.items():
        as_vision.place(workload)
        as_vision.write_log(workload, f"I am {number}\n", end=True)
    with transaction(as_vision.engine) as session:
        session.add_all(
            ServiceReplica(
                service=id_, number=number, version=1, workload=workloads.get(number, f"wl-{id_}-{number}"),
                kind="on_demand", is_base=True, ended_at=None if number in (3, 601) else func.now(),
            )
            for number in range(602)
        )  # fmt: skip

    def read() -> float:
        """Returns the number of pages of replicas that the API has sent."""
        lines = httpx.get(f"{as_vision.url}/metrics").text.splitlines()
        route = 'mizzen_api_requests_total{method="GET",route="/v1/services/{id}/replicas",status="200"} '
        return sum(float(line.removeprefix(route)) for line in lines if line.startswith(route))

    for options, expected in (
        (["600"], "train/0| I am 600\n"),
        ([], "train/0| I am 601\n"),
        (["--all"], "".join(f"{number}| train/0| I am {number}\n" for number in workloads)),
    ):
        before = read()
        assert run(["serve", "logs", "many", *options]) == 0
        assert read() == before + 1
        shown = capsys.readouterr()
        assert shown.out == expected
    assert "replica 582 has no logs" in shown.err and "replica 581 " not in shown.err
    assert run(["serve", "logs", "many", "602"]) == 3
    assert "has no replica 602" in capsys.readouterr().err
    for options in (["--all", "-f"], ["--all", "3"]):
        assert run(["serve", "logs", "many", *options]) == 2


def test_why_explains_the_replicas_of_a_service(
    as_vision: Service, submit: Submit, capsys: Capture, tmp_path: Path
) -> None:
    """`mizzen why SERVICE` has the notes, and the reasons of replicas that do not serve; other names are unknown."""
    file = tmp_path / "slow.yaml"
    file.write_text(SKYPILOT)
    assert run(["serve", "up", str(file), "-o", "json"]) == 0
    id_ = json.loads(capsys.readouterr().out)[0]["id"]
    workload = submit()
    with transaction(as_vision.engine) as session:
        row = session.get_one(ServiceRow, id_)
        row.target, row.notes = 1, ["no_spot_zones"]
        own = {"service": id_, "version": 1, "kind": "on_demand", "is_base": True}
        session.add(ServiceReplica(number=0, workload=workload, probe_error="status 503", **own))
    assert run(["why", workload]) == 0
    reasons = capsys.readouterr().out.splitlines()
    assert run(["why", "slow"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("slow: starting, 0/1 replicas ready") and "replica 0: " in shown
    assert all(line.strip() in shown for line in reasons if "waited" not in line) and "probe: status 503" in shown
    assert run(["why", "slow", "-o", "json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert (body["replicas"][0]["number"], body["notes"][0]["code"]) == (0, "no_spot_zones")
    assert run(["why", "fast"]) == 3
