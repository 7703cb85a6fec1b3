"""The walk-through of docs/slurm.md for a user who is no operator and not root, with the document's own commands."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from infra.stack.ports import free_port
from tests.slurm.cluster import cluster
from tests.slurm.test_pilots import USER, make_environment
from tests.stack.harness import ROOT, processes_of, wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.long, pytest.mark.stack, pytest.mark.timeout(900)]


def _steps() -> list[str]:
    """Returns the commands of each step of the section."""
    text = (ROOT / "docs" / "slurm.md").read_text().partition("## Alone on a cluster")[2].partition("\n## ")[0]
    steps = re.split(r"^\d\. ", text, flags=re.MULTILINE)[1:]
    return ["\n".join(line[8:] for line in step.splitlines() if line.startswith("        ")) for step in steps]


def test_a_user_runs_a_gang(tmp_path: Path) -> None:
    """All steps work as they are written, but for the installation, the ports and the shape of this cluster's nodes."""
    install, describe, start, use = _steps()
    with cluster(2) as slurm:
        home = slurm.folder / "home"
        home.mkdir()
        make_environment(home / "mizzen")
        os.chown(home, USER.pw_uid, USER.pw_gid)
        environ = {
            "HOME": str(home),
            # The programs of a real installation are all in the first folder.
            "PATH": f"{home}/mizzen/bin:{slurm.environ['PATH']}:{Path(sys.executable).parent}",
            "SLURM_CONF": str(slurm.conf),
        }
        ports = {"7443": str(free_port()), "8080": str(free_port())}

        def as_user(commands: str) -> subprocess.Popen[str]:
            for before, after in (*ports.items(), ("cpus: 8", "cpus: 2"), ("32GiB", "1GiB")):
                commands = commands.replace(before, after)
            commands = commands.replace("mizzen up ", f"mizzen up --port {ports['8080']} ")
            return subprocess.Popen(
                ["bash", "-euc", commands], cwd=home, env=environ, user=USER.pw_uid, group=USER.pw_gid, extra_groups=[],
                text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

        def done(commands: str) -> str:
            process = as_user(commands)
            said, _ = process.communicate(timeout=300)
            assert process.returncode == 0, f"{commands}\n{said}"
            return said

        began_s, servers = time.monotonic(), []
        try:
            done("\n".join(line for line in install.splitlines() if "pip install" not in line))
            done(describe)
            for command in start.splitlines():
                servers.append(as_user(f"exec {command} > {len(servers)}.log 2>&1"))
                said = home / f"{len(servers) - 1}.log"
                up = "mizzen is up" if len(servers) == 1 else "listen"
                wait_until(lambda: up in said.read_text(), f"{command}: {said}", 200)  # noqa: B023
            said_last = done(use)
            print(f"{time.monotonic() - began_s:.0f} s for all steps but the installation")
            assert len(re.findall(rf"{os.uname().nodename}", said_last)) >= 2
            assert len(slurm.jobs()) >= 1
        finally:
            for server in servers:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(server.pid, signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    server.wait(60)
            for pid in processes_of(home):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
