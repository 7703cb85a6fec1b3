"""`mizzen up`: starting, stopping, killing and restarting it, and its errors."""

import base64
import html
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from temporalio.api.common.v1 import Payload
from temporalio.api.workflowservice.v1 import DescribeNamespaceRequest

from infra.config.settings import load_settings
from infra.payload_codec import ENCODING, parts_of
from infra.temporal_client import connect
from tests.stack.harness import ROOT, Up, processes_of, wait_until

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]
LONG = pytest.mark.long


def _task_pids(up: Up, workload: str) -> set[int]:
    out = set()
    for pid in processes_of(up.data):
        try:
            environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            continue
        if f"MIZZEN_WORKLOAD={workload}".encode() in environ:
            out.add(pid)
    return out


async def test_closed_workflows_are_kept_as_configured(shared: Up) -> None:
    """The embedded Temporal's namespace has the configured retention instead of the server's default."""
    client = await connect(shared.temporal)
    described = await client.workflow_service.describe_namespace(DescribeNamespaceRequest(namespace="default"))
    assert described.config.workflow_execution_retention_ttl.seconds == 100_000


async def test_what_temporal_stores_is_encrypted(shared: Up) -> None:
    """No payload of any workflow is readable in Temporal without the keys, which only the owner can read."""
    workload = shared.submit("sealed", steps=1, step_s=0.1)
    wait_until(lambda: shared.ended(workload), "the workload succeeds")
    reader = await connect(shared.temporal.model_copy(update={"payload_keys": None}))
    encodings: set[bytes] = set()
    async for found in reader.list_workflows():
        async for event in reader.get_workflow_handle(found.id, run_id=found.run_id).fetch_history_events():
            # The SDK writes when a local activity ran, and nothing of its values, into a marker.
            event.marker_recorded_event_attributes.details.pop("data", None)
            for payload in parts_of(event):
                if isinstance(payload, Payload) and "type" not in payload.metadata:  # Search attributes have a type.
                    encodings.add(payload.metadata["encoding"])
    assert encodings == {ENCODING}
    assert (shared.data / "payload.keys").stat().st_mode & 0o077 == 0


def test_killed_up_is_taken_over(shared: Up, tmp_path: Path) -> None:
    """After `kill -9` of `mizzen up` its tasks continue, and the next `mizzen up` takes over the same processes."""
    gate = tmp_path / "gate"
    workload = shared.submit("long", steps=3, step_s=0.2, gate=gate)
    wait_until(lambda: shared.phase(workload) == "running" and _task_pids(shared, workload), "the workload runs")
    before = _task_pids(shared, workload)
    assert shared.process is not None
    shared.process.send_signal(signal.SIGKILL)
    shared.process.wait()
    shared.start()
    assert before <= _task_pids(shared, workload)
    gate.touch()
    wait_until(lambda: shared.ended(workload), "the workload succeeds")
    assert [a["attempt"] for a in shared.client().attempts(workload)] == [1]


def test_interrupt_saves_stops_and_goes_on(shared: Up, tmp_path: Path) -> None:
    """On SIGHUP, as on Ctrl-C, the tasks save and no process is left; after the next start the workload resumes."""
    gate = tmp_path / "gate"
    workload = shared.submit("long", steps=20, step_s=0.2, tasks=2, gate=gate)
    wait_until(lambda: shared.saved_step(workload), "the workload has saved a checkpoint")
    assert shared.interrupt(signal.SIGHUP) == 0
    assert processes_of(shared.data) == {}
    assert (shared.folder / "up.log").read_text().splitlines()[-1] == "mizzen has stopped"
    gate.touch()
    shared.start()
    wait_until(lambda: shared.ended(workload), "the workload resumes and succeeds")
    attempts = shared.client().attempts(workload)
    assert [a["attempt"] for a in attempts] == [1, 2]
    assert attempts[1]["resumed_step"] >= attempts[0]["checkpoint_step"] > 0


def test_second_up_on_a_folder_is_refused(shared: Up) -> None:
    """A second stack on the same data folder is refused; the error names the first stack's process."""
    other = Up(shared.folder, lost_s=120)
    done = subprocess.run(other.command(), cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 6
    assert shared.process is not None and str(shared.process.pid) in done.stderr


@pytest.mark.parametrize(
    "parts",
    [
        # `test_liveness.py` has a worker and an API that the supervisor kills itself.
        pytest.param(("server worker", "server api"), marks=LONG, id="processes"),
        pytest.param(("server agents", "start-dev", "/postgres -D"), id="servers-and-agents"),
    ],
)
def test_dead_children_are_restarted(shared: Up, parts: tuple[str, ...]) -> None:
    """Each killed part is started again, and the stack runs a new workload."""
    log = shared.data / "run" / "log"
    for part in parts:
        pids = {pid for pid, command in processes_of(shared.data).items() if part in command}
        assert pids, f"no process of {part}; logs: {sorted(p.name for p in log.iterdir())}"
        os.kill(min(pids), signal.SIGKILL)
        wait_until(
            lambda part=part, pids=pids: {p for p, c in processes_of(shared.data).items() if part in c} - pids,
            f"{part} is started again",
        )
    workload = shared.submit("after", steps=3, step_s=0.05)
    wait_until(lambda: shared.ended(workload), "a new workload succeeds")


def test_taken_port_is_named(up: Up) -> None:
    """If the port is in use, `mizzen up` exits with a one-line error that names it, and leaves no process."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        up.port = taken.getsockname()[1]
        done = subprocess.run(up.command(), cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 6
    assert str(up.port) in done.stderr and "--port" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert processes_of(up.data) == {}


def test_operators_see_the_ui_of_temporal(shared: Up) -> None:
    """The API shows the UI of the embedded Temporal to a browser that sends an operator's key as password."""
    page, workflows = "/temporal/", "/temporal/api/v1/namespaces/default/workflows"
    viewer = shared.client().create_key("viewer", label="looks")["key"]
    operator = (shared.data / "operator.key").read_text().strip()
    with httpx.Client(base_url=f"http://127.0.0.1:{shared.port}") as browser:
        asked = browser.get(page)
        assert asked.status_code == 401 and asked.headers["www-authenticate"].startswith("Basic ")
        assert browser.get(page, auth=("", viewer)).status_code == 403
        assert "<!doctype html>" in browser.get(page, auth=("", operator)).text.lower()
        listed = browser.get(workflows, auth=("", operator)).json()
        assert "MachineWorkflow" in {one["type"]["name"] for one in listed["executions"]}
        assert browser.get("/v1/workloads", auth=("", operator)).status_code == 401, "only for the UI"


def test_the_console_leads_operators_to_workflows(shared: Up) -> None:
    """The page of a machine has a link to the runs of its workflow, which Temporal finds; only operators have it."""
    machine = shared.client().machines()[0]["id"]
    operator = (shared.data / "operator.key").read_text().strip()
    links = {}
    for key in (operator, shared.client().create_key("viewer", label="looks")["key"]):
        with httpx.Client(base_url=f"http://127.0.0.1:{shared.port}") as browser:
            assert browser.post("/console/login", data={"key": key}).status_code == 303
            links[key] = re.findall(r'href="(/temporal/[^"]*)"', browser.get(f"/console/machines/{machine}").text)
            if key == operator:
                query = httpx.URL(html.unescape(links[key][0])).params["query"]
                path = "/temporal/api/v1/namespaces/default/workflows"
                listed = browser.get(path, params={"query": query}, auth=("", operator)).json()
                assert {one["execution"]["workflowId"] for one in listed["executions"]} == {f"machine/{machine}"}
    assert [len(found) for found in links.values()] == [1, 0]


def test_operators_see_payloads_in_the_ui_of_temporal(shared: Up) -> None:
    """The UI decrypts payloads with the API's codec, which serves operators only, and also Temporal's command."""
    machine = shared.client().machines()[0]["id"]
    base, codec = f"http://127.0.0.1:{shared.port}", "/temporal/codec"
    operator = (shared.data / "operator.key").read_text().strip()
    viewer = shared.client().create_key("viewer", label="looks")["key"]
    events = f"/temporal/api/v1/namespaces/default/workflows/machine%2F{machine.replace('/', '%2F')}/history"
    with httpx.Client(base_url=base) as browser:
        assert browser.get("/temporal/api/v1/settings", auth=("", operator)).json()["Codec"]["Endpoint"] == codec
        found = browser.get(events, auth=("", operator)).json()
        (event,) = [e for e in found["history"]["events"] if e["eventType"].endswith("WORKFLOW_EXECUTION_STARTED")]
        body = event["workflowExecutionStartedEventAttributes"]["input"]
        assert machine not in base64.b64decode(body["payloads"][0]["data"]).decode(errors="replace")
        for auth, status in ((None, 401), (("", viewer), 403), (("", operator), 200)):
            answer = browser.post(f"{codec}/decode?preserveStorageRefs=true", json=body, auth=auth)
            assert answer.status_code == status
            assert (machine in answer.text) is False  # Also the plain value is in base64.
        (plain,) = answer.json()["payloads"]
        assert base64.b64decode(plain["data"]).decode() == f'"{machine}"'
        assert "access-control-allow-origin" not in answer.headers
        again = browser.post(f"{codec}/encode", json=answer.json(), auth=("", operator)).json()
        assert browser.post(f"{codec}/decode", json=again, auth=("", operator)).json() == answer.json()
        strange = {"payloads": [again["payloads"][0] | {"data": "AAAA"}]}
        assert browser.post(f"{codec}/decode", json=strange, auth=("", operator)).json() == strange
        shown = subprocess.run(
            [Path(sys.executable).parent / "temporal", "workflow", "show", "--workflow-id", f"machine/{machine}",
             "--output", "json", "--address", str(shared.temporal.address), "--codec-endpoint", base + codec,
             "--codec-auth", f"Bearer {operator}"],
            capture_output=True, text=True, timeout=60, check=True,
        )  # fmt: skip
        assert base64.b64encode(f'"{machine}"'.encode()).decode() in shown.stdout
        assert browser.post(f"{codec}/decode", content="{", auth=("", operator)).status_code == 415
        assert browser.post(f"{codec}/decode", json=[1], auth=("", operator)).status_code == 422


def test_agents_recognise_the_gateway(shared: Up) -> None:
    """Agents trust only the certificate of this start, so a process that takes the gateway's port gets no keys."""
    temporal = load_settings(shared.data / "run" / "agents.yaml").temporal
    assert temporal.address is not None and temporal.tls_ca is not None
    host, _, port = temporal.address.partition(":")

    def handshake(context: ssl.SSLContext) -> None:
        context.set_alpn_protocols(["h2"])
        with (
            socket.create_connection((host, int(port))) as plain,
            context.wrap_socket(plain, server_hostname=host),
        ):
            pass

    handshake(ssl.create_default_context(cafile=str(temporal.tls_ca)))
    with pytest.raises(ssl.SSLCertVerificationError):
        handshake(ssl.create_default_context())
