"""`mizzen up --console`: the printed link logs a browser in, whose forms create a tenant and run the first workload."""

import os
import re
import time
from pathlib import Path

import httpx
import pytest

from mizzen_client.cli.app import run
from tests.cli.service import Capture
from tests.console.forms import csrf_of, document_of
from tests.stack.harness import Up, wait_until

pytestmark = [pytest.mark.stack, pytest.mark.long, pytest.mark.timeout(300)]
_LIMIT_S = 180.0


class _UpWithConsole(Up):
    def command(self) -> list[str]:
        return [*super().command(), "--console"]


def test_from_nothing_to_a_workload_that_has_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """All of it takes less than three minutes. `mizzen console` prints another link, for the key of a context."""
    began_s = time.monotonic()
    up = _UpWithConsole(tmp_path / "up", None)
    up.environment = {"DISPLAY": "", "WAYLAND_DISPLAY": ""}
    try:
        up.start()
        log = up.folder / "up.log"
        wait_until(lambda: "works once" in log.read_text(), "the link is printed")
        link = re.search(r"console +(\S+)", log.read_text())
        assert link is not None
        with httpx.Client(follow_redirects=True, timeout=60) as browser:
            first = browser.get(link[1])
            assert "<h1>Overview</h1>" in first.text
            base = f"http://127.0.0.1:{up.port}/console"
            fields = {"csrf": csrf_of(first), "name": "vision", "level": "3", "gpus": "gpu=8"}
            assert browser.post(f"{base}/tenants", data=fields).status_code == 200
            document = document_of(browser.get(f"{base}/workloads/new"))
            shown = browser.post(f"{base}/workloads/new", data={"csrf": fields["csrf"], "document": document})
            assert "<h1>hello</h1>" in shown.text
            wait_until(lambda: "succeeded: " in browser.get(shown.url).text, "hello has succeeded", 120)
            wait_until(lambda: "rank 1 of 2" in browser.get(f"{shown.url}/logs").text, "its output is shown")
        assert time.monotonic() - began_s < _LIMIT_S
        monkeypatch.setenv("MIZZEN_API", f"http://127.0.0.1:{up.port}")
        monkeypatch.setenv("MIZZEN_API_KEY", (up.data / "operator.key").read_text().strip())
        for name in ("DISPLAY", "WAYLAND_DISPLAY"):
            monkeypatch.delenv(name, raising=False)
        assert run(["console"]) == os.EX_OK
        assert httpx.get(capsys.readouterr().out.strip()).headers["location"] == "/console"
    finally:
        up.close()
