"""The table of commands in docs/coming-from.md: each command of mizzen runs, with a real API."""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from domain.ids import element_id
from domain.phases import Phase
from infra.db.array_rows import take_element
from infra.db.session import transaction
from mizzen.objects import open_store
from mizzen_client.cli.app import run
from tests.cli.service import DOCUMENT, Capture, Service
from tests.cli.test_serving import SKYPILOT
from tests.stored_outputs import store_output, tar_of

PAGE = Path(__file__).parents[2] / "docs/coming-from.md"
COMMANDS = re.findall(r"^\|.*\| `mizzen (.+)` \|$", PAGE.read_text(), re.MULTILINE)
FOLLOWING = {"-f", "--wait"}
"""Options that wait for tasks, which this API does not start."""
OPERATORS = {"preempt", "machines", "clusters", "tenants", "costs", "queue"}


def test_there_are_thirty_commands() -> None:
    assert len(COMMANDS) >= 30 and len({*COMMANDS}) == len(COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_command(
    command: str, service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """The command ends with the exit code 0, with a workload `train` and the files that it names."""
    words = [word for word in shlex.split(command) if word not in FOLLOWING]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MIZZEN_API", service.url)
    monkeypatch.setenv("MIZZEN_API_KEY", service.keys["vision"])
    Path("train.sbatch").write_text("#!/bin/bash\n#SBATCH --mem=1G\ntrue\n")
    Path("train.yaml").write_text(yaml.safe_dump({**DOCUMENT, "name": "train", "labels": {"sweep": "42"}}))
    Path("chat.yaml").write_text(SKYPILOT)
    Path("a.out").write_text("#!/bin/sh\n")
    [id_] = _output(capsys, "submit", "train.yaml", "-o", "name")
    if words[:2] == ["serve", "down"]:
        run(["serve", "up", "chat.yaml"])
    if words[0] == "release":
        run(["hold", id_])
    if words[0] in ("logs", "events", "show", "preempt", "get"):
        service.place(id_)
    if words[0] == "get":
        store_output(open_store(service.folder.as_uri()), id_, [tar_of(weights=b"w")])
    if words[0] == "wait":
        service.become(id_, Phase.SUCCEEDED)
    if words[0] == "run" and "--detach" not in words:
        words.insert(1, "--detach")  # No task of this API ever ends.
    if words[0] in OPERATORS:
        monkeypatch.setenv("MIZZEN_API_KEY", service.keys["operator"])
    words = [id_ if word == "train" and words[0] != "ls" else word for word in words]
    if any(re.match("sweep(/|$)", word) for word in words):
        words = _with_array(words, service, capsys)
    if any(word.startswith("prepare") for word in words):
        _output(capsys, "submit", "train.yaml", "--name", "prepare", "-o", "name")
    if "--dry-run" in words:  # It needs a scheduler, which this API does not have.
        assert run([*words, "--patience", "0"]) == 6 and "no scheduler" in capsys.readouterr().err
    else:
        assert run(words) == 0, capsys.readouterr().err


def _with_array(words: list[str], service: Service, capsys: Capture) -> list[str]:
    """Submits the array `sweep`, whose first element has failed; returns the words with its id instead of its name."""
    [array] = _output(capsys, "submit", "train.yaml", "--name", "sweep", "--array", "0-9", "-o", "name")
    with transaction(service.engine) as session:
        take_element(session, array, 0, 0)
    service.become(element_id(array, 0), Phase.FAILED, 0)
    return [re.sub("^sweep(?=/|$)", array, word) for word in words]


def _output(capsys: Capture, *command: str) -> list[str]:
    capsys.readouterr()
    assert run([*command]) == 0
    return capsys.readouterr().out.split()
