"""Pilots of a user of the cluster, who is no operator and not root: `mizzen pilots --slurm`."""

import json
import os
import pwd
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.cluster import SlurmCluster, cluster
from tests.slurm.site import SlurmSite
from tests.stack.harness import wait_until

pytestmark = [pytest.mark.slurm, pytest.mark.long, pytest.mark.stack, pytest.mark.timeout(400)]
USER = pwd.getpwnam("nobody")
_PACKAGES = next(path for path in sys.path if path.endswith("site-packages"))


def make_environment(folder: Path) -> Path:
    """Makes a virtual environment with mizzen that the user can read, as in a shared home; returns its command."""
    python = f"/usr/bin/python3.{sys.version_info.minor}"
    if not Path(python).exists():
        pytest.skip(f"the user needs {python}, which does not exist")
    subprocess.run([python, "-m", "venv", "--without-pip", folder], check=True)
    (packages,) = folder.glob("lib/python3*/site-packages")
    (packages / "mizzen.pth").write_text(f"import site; site.addsitedir({_PACKAGES!r})\n")
    (command := folder / "bin" / "mizzen").write_text(
        f"#!{folder}/bin/python\nimport sys\nfrom mizzen.cli.main import main\nsys.exit(main())\n"
    )
    command.chmod(0o755)
    return command


class SlurmUser:
    """A person with an account on the cluster, and an API key of one tenant."""

    def __init__(self, slurm: SlurmCluster, there: SlurmSite, tenant: str) -> None:
        self._home = slurm.folder / "home"
        self._home.mkdir()
        self._command = make_environment(self._home / "mizzen")
        os.chown(self._home, USER.pw_uid, USER.pw_gid)
        key = there.up.client().create_key("submitter", tenant)["key"]
        self._environ = {"HOME": str(self._home), "PATH": slurm.environ["PATH"], "SLURM_CONF": str(slurm.conf)}
        self._environ["MIZZEN_PILOTS_FOLDER"] = str(self._home / "keys")
        self._environ |= {"MIZZEN_API": f"http://127.0.0.1:{there.up.port}", "MIZZEN_API_KEY": key}
        (ca := self._home / "ca.crt").write_bytes((there.up.data / "run" / "gateway.crt").read_bytes())
        gateway = json.loads((there.up.data / "run" / "agents.yaml").read_text())["temporal"]["address"]
        self._gateway = ["--gateway", gateway, "--gateway-ca", str(ca), "--address", "127.0.0.1"]

    def start(self, nodes: int) -> None:
        """Starts pilots."""
        shape = ["--cpus", "2", "--memory", "1GiB", "--gpus", "1", "--gpu-type", "a100", "--gres", "gpu:a100:1"]
        place = ["--partition", "batch", "--region", "hpc", "--state-dir", str(self._home)]
        self.run("pilots", "--slurm", "--nodes", str(nodes), "--time", "1h", *place, *shape, *self._gateway)
        assert not (self._home / ".mizzen" / "pilots").exists()

    def pilots(self) -> list[dict[str, Any]]:
        """Returns what `mizzen pilots` lists."""
        found: list[dict[str, Any]] = json.loads(self.run("pilots", "ls", "-o", "json"))
        return found

    def other_job(self, name: str) -> str:
        """Submits a pilot as for another tenant or installation, which waits; returns its number."""
        return self._as_user(
            "sbatch", "--parsable", "--hold", "--chdir=/", "--output=/dev/null", f"--job-name={name}",
            "--comment=mizzen:pilots", "--wrap=true",
        ).strip()  # fmt: skip

    def run(self, *words: str) -> str:
        """Runs a command of mizzen as this user.

        Raises:
            AssertionError: it failed.
        """
        return self._as_user(str(self._command), *words)

    def _as_user(self, *words: str) -> str:
        done = subprocess.run(
            words, env=self._environ, cwd="/", user=USER.pw_uid, group=USER.pw_gid, extra_groups=[],
            capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture
def there(tmp_path: Path) -> Iterator[tuple[SlurmCluster, SlurmSite]]:
    """A cluster, and an installation whose bucket is a folder that all users of the cluster share."""
    with cluster(2) as slurm:
        (bucket := slurm.folder / "bucket").mkdir()
        bucket.chmod(0o777)
        fleet = f"{{version: 1, regions: [{{name: hpc, bucket: 'file://{bucket}', clusters: []}}]}}"
        before = os.umask(0)
        made = SlurmSite(slurm, tmp_path, fleet, lost_after_s=1)
        try:
            made.start()
            yield slurm, made
        finally:
            os.umask(before)
            made.close()


def test_pilots_serve_only_their_tenant(there: tuple[SlurmCluster, SlurmSite]) -> None:
    """A user's pilots run the gangs of the user's tenant as this user, and nothing of others; `stop` ends them."""
    slurm, installation = there
    client = installation.up.client()
    client.set_tenant("u", 3, {"a100": 16}, None)
    user = SlurmUser(slurm, installation, "t")
    user.start(3)
    wait_until(lambda: [one["state"] for one in user.pilots()] == ["ready"] * 3, "the pilots have joined")
    assert {one["isolation"] for one in user.pilots()} <= {"none", "sandbox"}

    def submit(tenant: str, **more: Any) -> str:
        resources = {"accelerators": "a100:1", "cpus": 1, "memory": "64MiB"}
        job = {"name": "say", "tasks": 3, "resources": resources, "run": "id -u"}
        return str(client.submit({"version": 1, "name": "ids", "tenant": tenant, "jobs": [job], **more})["id"])

    foreign, unasked = submit("u", capacity=["own"]), submit("t")
    own = submit("t", capacity=["own"])
    wait_until(lambda: installation.up.ended(own), "the gang has run")
    lines = wait_until(lambda: (found := list(client.logs(own)))[2:] and found, "three lines are there")
    assert [line.decode().split()[-1] for line in lines] == [str(USER.pw_uid)] * 3
    assert [(client.workload(one)["phase"], client.allocations(one)) for one in (foreign, unasked)] == [
        ("pending", []),
        ("pending", []),
    ]
    elsewhere = user.other_job("pilot-elsewhere")
    user.run("pilots", "stop", "--all")
    wait_until(lambda: slurm.jobs() == {"pilot-elsewhere": [elsewhere]}, "the tenant's jobs have ended, and no others")
    user.run("pilots", "stop", "pilot-elsewhere")
    wait_until(lambda: not slurm.jobs(), "the other job has ended, too")
    wait_until(lambda: not client.machines(), "the machines are removed")
