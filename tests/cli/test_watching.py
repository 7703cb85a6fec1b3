"""`mizzen top` and `mizzen ls --watch`: the screen fits the terminal, follows changes, and leaves no trace."""

import fcntl
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from domain.phases import Phase
from mizzen_client import Client
from mizzen_client.cli.app import run
from tests.cli.service import DOCUMENT, Capture, Cutter, Service

MIZZEN = [sys.executable, "-m", "mizzen.cli.main"]
OPEN, CLOSE = "\x1b[?1049h", "\x1b[?7h\x1b[?25h\x1b[?1049l"
TIMEOUT_S = 30


class Terminal:
    """A command at a terminal."""

    def __init__(self, url: str, key: str, columns: int, rows: int, *command: str) -> None:
        self._near, far = pty.openpty()
        self.before = termios.tcgetattr(far)
        self.size(columns, rows)
        unset = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        environment = {**unset, "MIZZEN_API": url, "MIZZEN_API_KEY": key}
        # A process group of its own: SIGTSTP does not stop a group without a parent in its session, and a test run that
        # was started in the background is such a group.
        self.process = subprocess.Popen(
            [*MIZZEN, *command], env=environment, stdin=far, stdout=far, stderr=far, process_group=0
        )
        self.far = far
        self.text = ""

    def size(self, columns: int, rows: int) -> None:
        """Changes the size of the terminal."""
        self.columns, self.rows = columns, rows
        fcntl.ioctl(self._near, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def read(self) -> None:
        """Reads what the command has written."""
        while select.select([self._near], [], [], 0.05)[0]:
            self.text += os.read(self._near, 65536).decode()

    @property
    def screen(self) -> list[str]:
        """The lines of the last complete frame, without colours."""
        self.read()
        frames = re.findall(r"\x1b\[H(.*?)\x1b\[J", self.text, re.DOTALL)
        return [re.sub(r"\x1b\[[0-9;]*[mK]", "", line) for line in re.split("\r+\n", frames[-1])] if frames else []

    def until(self, condition: Callable[[list[str]], Any]) -> list[str]:
        """Waits for a screen that fits a condition, and returns it. Each screen fits the terminal."""
        end_s = time.monotonic() + TIMEOUT_S
        while not condition(found := self.screen):
            assert time.monotonic() < end_s and self.process.poll() is None, (found, self.text[-500:])
        assert len(found) <= self.rows and all(len(line) <= self.columns for line in found)
        return found

    def stop(self) -> None:
        """Sends SIGTSTP, and waits until the command is stopped."""
        self.process.send_signal(signal.SIGTSTP)
        end_s = time.monotonic() + TIMEOUT_S
        while os.waitpid(self.process.pid, os.WUNTRACED | os.WNOHANG)[0] == 0:
            assert time.monotonic() < end_s, "SIGTSTP does not stop the command"
            time.sleep(0.02)

    def close(self) -> None:
        """Kills the command."""
        self.process.kill()
        self.process.wait()
        os.close(self._near)
        os.close(self.far)


@pytest.fixture
def terminal(service: Service) -> Iterator[Callable[..., Terminal]]:
    """A function that runs a command at a terminal of some columns and rows."""
    made: list[Terminal] = []

    def begin(columns: int, rows: int, *command: str, url: str | None = None, key: str | None = None) -> Terminal:
        made.append(Terminal(url or service.url, key or service.keys["speech"], columns, rows, *command))
        return made[-1]

    yield begin
    for one in made:
        one.close()


def submitted(service: Service, number: int) -> list[str]:
    """Submits workloads, of which the newest runs; all others of the tenant have ended."""
    with Client(service.url, service.keys["speech"]) as client:
        for other in list(client.workloads(phases=("live",))):
            service.become(other["id"], Phase.CANCELLED, other["attempt"])
        body = {**DOCUMENT, "tenant": "speech"}
        ids = [client.submit({**body, "name": f"w-{n}"})["id"] for n in range(number)]
    service.place(ids[-1])
    return ids


@pytest.fixture
def few(service: Service) -> list[str]:
    """Four workloads, of which the newest runs."""
    return submitted(service, 4)


def test_top_fits_the_terminal_and_follows(terminal: Callable[..., Terminal], service: Service) -> None:
    """80x24 has the fleet, what runs and what waits; changes of both are drawn; Ctrl-C restores the screen."""
    many = submitted(service, 30)
    at = terminal(80, 24, "top", "--interval", "0.5")
    first = at.until(lambda lines: any(many[-1] in line for line in lines))
    assert len(first) == 24
    assert re.match(r"fleet  1 region, 1 machines ready(, 1 cordoned)?; GPUs held: a100 ", first[0])
    assert first[1].startswith("work   1 running, 29 pending; 29 in the queue")
    position = {id_: n for n, line in enumerate(first) for id_ in many if id_ in line}
    assert position[many[-1]] < position[many[0]], "what runs comes first"
    assert re.fullmatch(r"\.\.\. and \d+ more lines", first[-2]) and first[-1].endswith("Ctrl-C ends")
    service.become(many[-1], Phase.SUCCEEDED)
    at.until(lambda lines: lines[1].startswith("work   29 pending"))
    at.size(40, 10)
    at.process.send_signal(signal.SIGWINCH)
    at.until(lambda lines: len(lines) == 10)
    at.process.send_signal(signal.SIGINT)
    assert at.process.wait(TIMEOUT_S) == 0
    at.read()
    assert at.text.count(OPEN) == 1 and at.text.endswith(CLOSE)
    assert termios.tcgetattr(at.far) == at.before


def test_ls_watch_is_stopped_and_ends(terminal: Callable[..., Terminal], few: list[str]) -> None:
    """The screen is closed while the command is stopped, drawn again when it goes on, and closed by SIGTERM."""
    at = terminal(100, 12, "ls", "--watch", "--interval", "0.5", "--name", "w-3")
    at.until(lambda lines: any(few[3] in line for line in lines))
    at.stop()
    at.read()
    assert at.text.endswith(CLOSE)
    at.process.send_signal(signal.SIGCONT)
    at.until(lambda _: at.text.count(OPEN) == 2 and at.text.rfind("\x1b[J") > at.text.rfind(OPEN))
    at.process.terminate()
    assert at.process.wait(TIMEOUT_S) == 143
    at.read()
    assert at.text.endswith(CLOSE)


def test_the_last_screen_stays_while_the_api_is_away(
    terminal: Callable[..., Terminal], service: Service, few: list[str]
) -> None:
    """The last line has the error instead."""
    cutter = Cutter(service.port)
    at = terminal(100, 12, "ls", "--watch", "--interval", "0.5", "--name", "w-3", url=cutter.url)
    at.until(lambda lines: any(few[3] in line for line in lines))
    cutter.close()
    found = at.until(lambda lines: not lines[-1].endswith("Ctrl-C ends"))
    assert any(few[3] in line for line in found) and "onnect" in found[-1]


def test_an_error_leaves_the_screen(terminal: Callable[..., Terminal], service: Service) -> None:
    """A key that is refused is an error as without --watch."""
    at = terminal(80, 24, "top", key="mzn_wrong")
    assert at.process.wait(TIMEOUT_S) == 4
    at.read()
    assert CLOSE in at.text and "key" in at.text.rpartition(CLOSE)[2]


def test_one_snapshot_without_a_terminal(
    service: Service, few: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """In a pipe the output is plain text, printed once; in JSON it has all."""
    monkeypatch.setenv("MIZZEN_API", service.url)
    monkeypatch.setenv("MIZZEN_API_KEY", service.keys["speech"])
    assert run(["top"]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and out.startswith("fleet  1 region") and all(id_ in out for id_ in few)
    assert run(["ls", "--watch", "--name", "w-3"]) == 0
    assert capsys.readouterr().out.count(few[3]) == 1
    assert run(["top", "-o", "json"]) == 0
    body = json.loads(capsys.readouterr().out)
    assert len(body["workloads"]) == 4 and body["regions"][0]["name"] == "north" and body["queue"]["total"] == 3
