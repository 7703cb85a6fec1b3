"""A user that is a bare number, without an entry in passwd and without USER and HOME, as in many containers."""

import contextlib
import json
import os
import shutil
import socket
import sys
from pathlib import Path

import pytest

from domain.machine_code import folder_of
from tests.stack.harness import ROOT, Up, wait_until

pytestmark = [
    pytest.mark.stack,
    pytest.mark.timeout(300),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can start processes as another user"),
]
UID = 2_345_678
_USUAL_PORTS = (8080, 5433, 7233, 8233)
# Python may be below a folder that only root can enter: the process gets a view of it, as tasks do.
_BECOME = """
import json, os, sys
told = json.loads(sys.argv[1])
sys.path.insert(0, told["root"])
from agent.view import enter_view, view_for
enter_view(view_for(told["uid"], told["paths"]))
os.setgroups([]); os.setgid(told["uid"]); os.setuid(told["uid"])
os.execve(told["argv"][0], told["argv"], told["env"])
"""


class BareUp(Up):
    """A stack that a bare number runs."""

    def command(self) -> list[str]:
        """Returns the command line that becomes the user and then `mizzen up`."""
        told = {
            "root": str(ROOT),
            "uid": UID,
            "paths": [str(ROOT), sys.prefix, sys.base_prefix, str(self.folder)],
            "argv": super().command(),
            "env": {"PATH": "/usr/bin:/bin", "XDG_CACHE_HOME": str(self.folder / "cache")},
        }
        return [sys.executable, "-I", "-c", _BECOME, json.dumps(told)]


def test_a_bare_number_runs_the_stack(tmp_path: Path) -> None:
    """Every part starts, among them Postgres and Temporal, whose programs look up their user, and a workload runs.

    The usual ports are in use, as if another user of the machine had started a stack: free ones replace them.
    """
    up = BareUp(tmp_path, fleet=None)
    for package in ("gms", "rms"):  # So that the loops are not compiled again.
        folder = Path(folder_of(str(ROOT / package)) or "")
        shutil.copytree(folder, up.folder / "cache" / "mizzen" / package / folder.name, copy_function=shutil.copy2)
    for path in (tmp_path, *tmp_path.rglob("*")):
        os.chown(path, UID, UID)
    up.cwd = tmp_path
    up.ports.clear()
    try:
        with contextlib.ExitStack() as others:
            for port in _USUAL_PORTS:
                with contextlib.suppress(OSError):  # Another process uses it already.
                    others.enter_context(socket.create_server(("127.0.0.1", port)))
            up.start(machines=False)
        taken = json.loads((up.data / "run" / "ports.json").read_text())
        assert len(taken) == 4 and not set(taken.values()) & set(_USUAL_PORTS)
        up.ports["port"] = taken["api.port (--port)"]
        assert f"http://127.0.0.1:{up.ports['port']}" in (up.folder / "up.log").read_text()
        up.client().set_tenant("t", 3, {"gpu": 8}, None)
        workload = up.submit("counts", steps=2, step_s=0.05, gpu="gpu")
        wait_until(lambda: up.ended(workload), "the workload succeeds")
        assert up.interrupt() == 0
    finally:
        up.close()
