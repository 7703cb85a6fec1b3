"""A person who follows a section of the documentation with its own commands, and keeps servers running meanwhile."""

import contextlib
import os
import pwd
import re
import signal
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from tests.stack.harness import ROOT, processes_of, wait_until

_STARTED_S = 500
"""The first start of a user compiles the schedulers, which takes minutes on a busy computer."""


def steps_of(page: str, section: str) -> list[str]:
    """Returns the commands of each step of a section of a page in `docs`."""
    text = (ROOT / "docs" / page).read_text().partition(f"## {section}\n")[2].partition("\n## ")[0]
    steps = re.split(r"^\d\. ", text, flags=re.MULTILINE)[1:]
    return ["\n".join(line[8:] for line in step.splitlines() if line.startswith("        ")) for step in steps]


class Person:
    """A person with a folder, in which all commands run."""

    def __init__(
        self,
        home: Path,
        environ: Mapping[str, str],
        changes: Mapping[str, str],
        user: pwd.struct_passwd | None = None,
    ) -> None:
        """`changes`: what is replaced in commands, because this computer differs. `user`: None is this process's."""
        self._home, self._environ, self._changes, self._user = home, {**environ, "HOME": str(home)}, changes, user
        self._servers: list[subprocess.Popen[str]] = []

    def does(self, commands: str) -> str:
        """Runs commands in a shell; returns what they print.

        Raises:
            AssertionError: one failed.
        """
        process = self._start(commands)
        said, _ = process.communicate(timeout=300)
        assert process.returncode == 0, f"{commands}\n{said}"
        return said

    def serves(self, command: str, until: str) -> None:
        """Starts a server, as in a terminal of its own, and waits until it has printed `until`."""
        log = self._home / f"{len(self._servers)}.log"
        with log.open("w") as out:
            self._servers.append(self._start(f"exec {command}", out))
        wait_until(lambda: until in log.read_text(), f"{command}: {log}", _STARTED_S)

    def close(self) -> None:
        """Ends the servers with Ctrl-C, and kills what is left."""
        for server in self._servers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(60)
        for pid in processes_of(self._home):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def _start(self, commands: str, out: IO[str] | int = subprocess.PIPE) -> subprocess.Popen[str]:
        for before, after in self._changes.items():
            commands = commands.replace(before, after)
        uid, gid, groups = (None, None, None) if self._user is None else (self._user.pw_uid, self._user.pw_gid, [])
        return subprocess.Popen(
            ["bash", "-euc", commands], cwd=self._home, env=self._environ, user=uid, group=gid, extra_groups=groups,
            text=True, stdout=out, stderr=subprocess.STDOUT, start_new_session=True,
        )  # fmt: skip
