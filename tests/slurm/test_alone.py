"""The walk-through of docs/slurm.md for a user who is no operator and not root, with the document's own commands."""

import os
import re
import sys
import time
from pathlib import Path

import pytest

from infra.stack.ports import free_port
from tests.clusters.walk_through import Person, steps_of
from tests.slurm.cluster import cluster
from tests.slurm.test_pilots import USER, make_environment

pytestmark = [pytest.mark.slurm, pytest.mark.long, pytest.mark.stack, pytest.mark.timeout(1200)]


def test_a_user_runs_a_gang() -> None:
    """All steps work as they are written, but for the installation, the ports and the shape of this cluster's nodes."""
    install, describe, start, use = steps_of("slurm.md", "Alone on a cluster")
    with cluster(2) as slurm:
        (home := slurm.folder / "home").mkdir()
        make_environment(home / "mizzen")
        os.chown(home, USER.pw_uid, USER.pw_gid)
        port = str(free_port())
        person = Person(
            home,
            # The programs of a real installation are all in the first folder.
            {
                "PATH": f"{home}/mizzen/bin:{slurm.environ['PATH']}:{Path(sys.executable).parent}",
                "SLURM_CONF": str(slurm.conf),
            },
            {
                "mizzen up ": f"mizzen up --port {port} ", "7443": str(free_port()), "8080": port,
                "cpus: 8": "cpus: 2", "32GiB": "1GiB",
            },
            USER,
        )  # fmt: skip
        began_s = time.monotonic()
        try:
            person.does("\n".join(line for line in install.splitlines() if "pip install" not in line))
            person.does(describe)
            for command, until in zip(start.splitlines(), ("mizzen is up", "listen"), strict=True):
                person.serves(command, until)
            said = person.does(use)
            print(f"{time.monotonic() - began_s:.0f} s for all steps but the installation")
            assert len(re.findall(rf"{os.uname().nodename}", said)) >= 2
            assert len(slurm.jobs()) >= 1
        finally:
            person.close()
