"""Notifications of a running stack: documents with `notify`, on loopback."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.stack.ports import free_port
from tests.receivers import Mailbox, Webhook, webhook
from tests.stack.harness import Up, wait_until
from tests.stack.test_run import ended, mizzen

pytestmark = [pytest.mark.stack, pytest.mark.timeout(300)]


@pytest.fixture
def hook() -> Iterator[Webhook]:
    """A server that answers requests of webhooks with 204."""
    with webhook() as running:
        yield running


def _document(name: str, script: str, **more: object) -> str:
    job = {"name": "main", "run": script, "resources": {"cpus": 0.1, "memory": "64MiB"}}
    return json.dumps({"version": 1, "name": name, "tenant": "t", "jobs": [job], **more})


@pytest.mark.rotating
def test_receivers_get_the_ends(shared: Up, mail: Mailbox, hook: Webhook, tmp_path: Path) -> None:
    """A workload, an array and a receiver that is away: each end once, and a delivery that fails is shown."""
    shared.client().set_secret("t", "hook", "a-key")
    to_hook = {"webhook": hook.url(), "secret": "hook"}
    away = {"webhook": f"http://127.0.0.1:{free_port()}/x", "secret": "hook"}
    to_mail = {"email": "a@example.org", "on": ["failed"]}
    both = [
        _document("one", "exit 3", notify=[to_hook, to_mail, away]),
        _document("many", "true", array="0-2", notify=[to_hook, to_mail]),
    ]
    (tmp_path / "both.yaml").write_text("\n---\n".join(both))
    code, out, err = ended(mizzen(shared, tmp_path, "submit", "both.yaml", "--wait", "-o", "name"))
    assert code == 1, err
    one, many = out.split()
    wait_until(lambda: len(hook.got) == 2 and len(mail.got) == 1, "the receivers have got the ends")
    assert {got.json["data"]["id"]: got.json["type"] for got in hook.got} == {
        one: "workload.failed", many: "workload.succeeded",
    }  # fmt: skip
    assert all(got.is_signed(b"a-key") for got in hook.got)
    assert mail.got[0][1]["Subject"] == "mizzen: one failed (tenant t)"
    shown = wait_until(lambda: _shown(shared, tmp_path, one), "the failed delivery is shown")
    assert "All connection attempts failed" in shown and "t0ken" not in shown
    assert shared.phase(one) == "failed"
    assert len(hook.got) == 2 and len(mail.got) == 1


def _shown(up: Up, folder: Path, workload: str) -> str:
    code, out, err = ended(mizzen(up, folder, "show", workload))
    assert code == 0, err
    return out if "tried again" in out else ""
