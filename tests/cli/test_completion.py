"""Completion of names: each shell's protocol, names that are kept for some seconds, and an API that is slow or away."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from domain.phases import Phase
from mizzen.objects import open_store
from mizzen_client import Client
from tests.cli.service import DOCUMENT, Cutter, Service

MIZZEN = [sys.executable, "-m", "mizzen.cli.main"]
TIMEOUT_S = 30


@pytest.fixture(autouse=True)
def workload(client: Client, as_vision: Service) -> Iterator[str]:
    """A workload with the name `completed`, and the environment of its tenant."""
    id_ = client.submit({**DOCUMENT, "name": "completed"})["id"]
    yield id_
    client.cancel(id_)


def offered(words: str, shell: str = "bash") -> str:
    """Returns what a shell gets for a line of words, of which the last is incomplete."""
    *before, last = words.split(" ")
    asked = {"COMP_WORDS": words, "COMP_CWORD": last if shell == "fish" else str(len(before))}
    environment = {**os.environ, **asked, "_MIZZEN_COMPLETE": f"{shell}_complete"}
    done = subprocess.run(MIZZEN, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    assert done.stderr == ""
    return done.stdout.strip()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_gets_names(shell: str) -> None:
    assert "completed" in offered("mizzen show compl", shell)
    assert "cancel" in offered("mizzen canc", shell)


def test_bash_completes_with_the_script(tmp_path: Path) -> None:
    """In bash itself, with the script that `mizzen completion bash` prints, and `mizzen` on the PATH."""
    command = tmp_path / "bin/mizzen"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m mizzen.cli.main "$@"\n')
    command.chmod(0o755)
    script = """eval "$(mizzen completion bash)"; COMP_WORDS=(mizzen logs -f compl); COMP_CWORD=3
        _mizzen_completion mizzen compl -f; echo "${COMPREPLY[@]}"; complete -p mizzen"""
    environment = {**os.environ, "PATH": f"{command.parent}:{os.environ['PATH']}"}
    bash = ["bash", "--norc", "-c", script]
    done = subprocess.run(bash, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    reply, registered = done.stdout.splitlines()
    assert reply == "completed" and "-F _mizzen_completion mizzen" in registered, done.stderr


def test_names_are_kept_for_some_seconds(service: Service, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The second Tab does not ask the API; others cannot read the names; after ten seconds the API is asked again."""
    cutter = Cutter(service.port)
    monkeypatch.setenv("MIZZEN_API", cutter.url)
    assert "completed" in offered("mizzen show compl")
    cutter.close()
    assert "completed" in offered("mizzen show compl")
    [kept] = (tmp_path / "cache/mizzen/names").iterdir()
    assert kept.stat().st_mode & 0o777 == 0o600 and service.keys["vision"] not in kept.name + kept.read_text()
    os.utime(kept, (time.time() - 11, time.time() - 11))
    assert offered("mizzen show compl") == ""
    monkeypatch.setenv("MIZZEN_API_KEY", service.keys["operator"])
    monkeypatch.setenv("MIZZEN_API", service.url)
    assert "completed" in offered("mizzen show compl"), "what one key sees is not kept for another"


def test_all_phases_are_offered() -> None:
    """Not only those of the newest workloads."""
    found = {line.removeprefix("plain,") for line in offered("mizzen ls --phase ").splitlines()}
    assert found == {*Phase, "held", "blocked", "live"}


def test_an_api_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is nothing to choose from, without a message; an unusable cache folder changes nothing."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("MIZZEN_API", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert offered("mizzen show compl") == ""
    monkeypatch.setenv("MIZZEN_API", "http://127.0.0.1:9")
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert offered("mizzen show compl") == ""


def test_names_of_other_things(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Services, tables and pools have completions, too."""
    monkeypatch.setenv("MIZZEN_API_KEY", service.keys["operator"])
    with Client(service.url, service.keys["operator"]) as client:
        open_store(service.folder.as_uri()).put("tables/completed-table/part", b"x")
        client.add_table("completed-table", "north")
        client.set_pool("north", "completed-pool", size=0)
        chat = client.create_service({
            "version": 1, "name": "completed-service", "tenant": "speech", "run": "true",
            "service": {"readiness_probe": "/", "replicas": 1},
        })  # fmt: skip
        assert offered("mizzen tables rm compl") == "plain,completed-table"
        assert offered("mizzen pools rm north/c") == "plain,north/completed-pool"
        assert offered("mizzen instances list --pool c") == "plain,completed-pool"
        assert offered("mizzen serve status compl") == "plain,completed-service"
        client.end_service(chat["id"])
        client.remove_pool("north", "completed-pool")
        client.remove_table("completed-table")
