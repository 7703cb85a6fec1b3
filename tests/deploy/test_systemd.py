"""The units of systemd: they are valid, run as ordinary users, and start commands with options that exist."""

import configparser
import shlex
import shutil
import subprocess
from pathlib import Path

import click
import pytest

from server.commands import group

UNITS = ("mizzen-agent", "mizzen-api", "mizzen-gateway", "mizzen-worker@")


def _unit(checkout: Path, name: str) -> configparser.RawConfigParser:
    found = configparser.RawConfigParser(strict=True)
    found.optionxform = str  # type: ignore[assignment, method-assign]
    found.read_string((checkout / "deploy/systemd" / f"{name}.service").read_text())
    return found


def test_every_unit_is_tested(checkout: Path) -> None:
    """The folder has no other unit."""
    assert {path.stem for path in (checkout / "deploy/systemd").iterdir()} == set(UNITS)


@pytest.mark.parametrize("name", UNITS)
def test_a_unit_starts_an_existing_command_as_an_ordinary_user(checkout: Path, name: str) -> None:
    """The user is not root, no program gains privileges, and the command has the unit's options."""
    service = _unit(checkout, name)["Service"]
    assert service["User"].startswith("mizzen") and service["NoNewPrivileges"] == "yes"
    words = shlex.split(service["ExecStart"].replace("/bin/sh -c", "", 1))
    text = " ".join(words)
    role = text[text.index("/opt/mizzen/bin/mizzen") :].split()[1]
    command = group.commands[role]
    assert isinstance(command, click.Command)
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    asked = {word for word in text.split() if word.startswith("--") and len(word) > 2}
    assert asked <= known, f"mizzen {role} has no {asked - known}"


@pytest.mark.parametrize(
    ("instance", "options"),
    [("control", ["--role", "control"]), ("region:east", ["--role", "region", "--region", "east"])],
)
def test_the_name_of_a_worker_says_its_role(checkout: Path, instance: str, options: list[str]) -> None:
    """What systemd gives the shell for an instance starts a worker with these options."""
    line = _unit(checkout, "mizzen-worker@")["Service"]["ExecStart"].replace("%i", instance).replace("$$", "$")
    words = shlex.split(line.replace("/opt/mizzen/bin/mizzen", "echo"))
    said = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    assert said == ["worker", "--config", "/etc/mizzen/mizzen.yaml", *options]


@pytest.mark.parametrize("name", UNITS)
def test_systemd_accepts_a_unit(checkout: Path, tmp_path: Path, name: str) -> None:
    """`systemd-analyze verify` finds nothing, if this machine has it. Its programs exist in a copy of the unit."""
    if (analyze := shutil.which("systemd-analyze")) is None:
        pytest.skip("systemd-analyze is not installed")
    unit = tmp_path / f"{name}{'test' if name.endswith('@') else ''}.service"
    text = (checkout / "deploy/systemd" / f"{name}.service").read_text()
    unit.write_text(text.replace("/opt/mizzen/bin/mizzen", "/bin/true"))
    done = subprocess.run(
        [analyze, "verify", "--man=no", unit], capture_output=True, text=True, timeout=60, check=False
    )
    told = [line for line in done.stderr.splitlines() if unit.name in line or "mizzen" in line]
    # Older versions of systemd do not have it (it is new in 254).
    assert [line for line in told if "DelegateSubgroup" not in line] == []
