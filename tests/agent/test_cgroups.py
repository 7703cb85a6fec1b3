"""Cgroups of an agent that is not in the root cgroup, as under systemd. The kernel judges: the tests use cgroup v2."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from agent.cgroups import remove_cgroup

ROOT = next(
    (
        Path(line.split()[1])
        for line in Path("/proc/self/mounts").read_text().splitlines()
        if line.split()[2] == "cgroup2" and "rw" in line.split()[3].split(",")
    ),
    None,
)
OFFERED = [] if ROOT is None else (ROOT / "cgroup.controllers").read_text().split()
LIMITS = {"memory": ("memory.max", 512 << 20), "hugetlb": ("hugetlb.2MB.max", 2 << 20)}
"""A file and a value for each controller. Where cgroup v1 has the memory controller, a test of v2 uses another one."""
CONTROLLER = next((name for name in LIMITS if name in OFFERED), None)

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or CONTROLLER is None, reason="needs root, and cgroup v2 with a controller"
)
AGENT = """
import os, signal, sys
from agent import cgroups

controller, file, value, run, uid = sys.argv[1:]
os.setresuid(int(uid), int(uid), int(uid))

class Limits(cgroups.TaskLimits):
    def v2(self):
        return {controller: [(file, int(value))]}

cgroups.CONTROLLERS = (controller,)
kill = cgroups.make_cgroup(run)
folders, missing = cgroups.limit(run, Limits(0, 0, 0))
wrong = cgroups.limit(run, type("Wrong", (Limits,), {"v2": lambda _: {controller: [(file, "much")]}})(0, 0, 0))
joined, joins = os.pipe()
task = os.fork()
if task == 0:
    os.close(joined)
    cgroups.join(folders)
    cgroups.join([kill])
    os.close(joins)
    signal.pause()
os.close(joins)
os.read(joined, 1)
with open(f"/proc/{task}/cgroup") as found:
    print(next(line.strip() for line in found if line.startswith("0::")))
cgroups.kill_cgroup(kill)
print(os.waitstatus_to_exitcode(os.waitpid(task, 0)[1]), missing, wrong)
with open(os.path.join(kill, file)) as limit:
    print(limit.read().strip())
print(*{kill, *folders})
for path in {kill, *folders}:
    cgroups.remove_cgroup(path)
"""
NOBODY = 65534


@dataclass(frozen=True)
class Unit:
    """A cgroup that has the controller and a process, like a unit of systemd."""

    path: Path

    def run_agent(self, run: str, uid: int, subgroup: str = "") -> list[str]:
        """Runs `AGENT` as a user in the cgroup, or in a subgroup of it; returns the lines of its output."""
        assert CONTROLLER is not None
        file, value = LIMITS[CONTROLLER]
        join = f"open({str(self.path / subgroup / 'cgroup.procs')!r}, 'w').write('0')\n"
        argv = [sys.executable, "-c", join + AGENT, CONTROLLER, file, str(value), run, str(uid)]
        ran = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout.splitlines()


@pytest.fixture
def unit() -> Iterator[Unit]:
    """A cgroup below the root."""
    assert ROOT is not None
    control = ROOT / "cgroup.subtree_control"
    given = CONTROLLER in control.read_text().split()
    control.write_text(f"+{CONTROLLER}")
    path = ROOT / f"mizzen-unit-{os.getpid()}"
    path.mkdir()
    try:
        yield Unit(path)
    finally:
        for folder, _, _ in os.walk(path, topdown=False):
            remove_cgroup(folder)
        # Other agents may use `mizzen`; then neither it nor the controller can be withdrawn.
        with contextlib.suppress(OSError):
            (ROOT / "mizzen").rmdir()
        if not given:
            with contextlib.suppress(OSError):
                control.write_text(f"-{CONTROLLER}")


def check(lines: list[str], folder: Path) -> None:
    """Checks the output of `AGENT`: the task joined `folder`, which has the limit and was used to kill it. A limit that
    the kernel refused was named, and did not remove the cgroup.
    """
    assert CONTROLLER is not None and ROOT is not None
    where, killed, limit, used = lines
    assert where.endswith("/" + str(folder.relative_to(ROOT)))
    assert killed == f"-9 [] ([], ['{CONTROLLER}'])"
    assert int(limit) == LIMITS[CONTROLLER][1]
    assert used == str(folder)
    assert not folder.exists()


def test_a_task_has_one_cgroup_for_its_limits_and_for_killing_it(unit: Unit) -> None:
    """A task of root's agent in a systemd unit keeps its limits when it joins the cgroup that kills it."""
    assert ROOT is not None
    run = f"wl-test{os.getpid()}.1.main.0"
    check(unit.run_agent(run, 0), ROOT / "mizzen" / f"mizzen-{run}")


def test_an_agent_without_root_limits_tasks_below_its_delegated_cgroup(unit: Unit) -> None:
    """With `Delegate=yes` and `DelegateSubgroup=agent`, an agent that is not root limits its tasks."""
    (unit.path / "agent").mkdir()
    for folder in (unit.path, unit.path / "agent"):
        os.chown(folder, NOBODY, NOBODY)
        for name in ("cgroup.procs", "cgroup.subtree_control"):
            os.chown(folder / name, NOBODY, NOBODY)
    run = f"wl-test{os.getpid()}.1.main.0"
    check(unit.run_agent(run, NOBODY, "agent"), unit.path / f"mizzen-{run}")
