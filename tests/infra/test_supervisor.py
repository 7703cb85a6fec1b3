"""Detection of ended processes by the supervisor."""

import asyncio
import errno
import os
import signal
import subprocess
from pathlib import Path

import pytest

from infra.errors import StackError
from infra.pidfds import first_end
from infra.stack.supervisor import Child, Supervisor, ended


def _refused(pid: int) -> int:
    raise OSError(errno.EPERM, "refused by a sandbox")


@pytest.mark.parametrize("tells", [True, False], ids=["kernel tells", "kernel refuses"])
async def test_an_end_is_noticed(monkeypatch: pytest.MonkeyPatch, tells: bool) -> None:
    """The end of a process is detected with and without pidfds; a process under SIGSTOP has not ended.

    A process that has already ended is not waited for.
    """
    if not tells:
        monkeypatch.setattr(os, "pidfd_open", _refused)
    process = subprocess.Popen(["sleep", "1000"])
    try:
        waiting = asyncio.create_task(ended(process))
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(0.3)
        assert not waiting.done()
        process.kill()
        await asyncio.wait_for(waiting, 20)
        assert process.returncode == -signal.SIGKILL
        await asyncio.wait_for(ended(process), 20)
    finally:
        process.kill()
        process.wait()


async def test_one_end_of_several_and_a_time_limit() -> None:
    """The wait ends with the first process that ends, even one that is no child, or at the time limit."""
    shell = subprocess.Popen(["sh", "-c", "sleep 1000 & echo $!; wait"], stdout=subprocess.PIPE, text=True)
    assert shell.stdout is not None
    grandchild = int(shell.stdout.readline())
    try:
        await first_end([shell.pid, grandchild], 0.1)
        waiting = asyncio.create_task(first_end([shell.pid, grandchild]))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        os.kill(grandchild, signal.SIGKILL)
        await asyncio.wait_for(waiting, 20)
        shell.wait(20)
        await asyncio.wait_for(first_end([shell.pid]), 20)
    finally:
        shell.kill()
        shell.wait()
        shell.stdout.close()


async def test_whoever_waits_may_be_cancelled() -> None:
    """Cancelling a wait does not end the process, and a later wait for it works."""
    process = subprocess.Popen(["sleep", "1000"])
    try:
        waiting = asyncio.create_task(ended(process))
        await asyncio.sleep(0.1)
        waiting.cancel()
        await asyncio.wait([waiting])
        assert waiting.cancelled() and process.poll() is None
        again = asyncio.create_task(ended(process))
        process.kill()
        await asyncio.wait_for(again, 20)
    finally:
        process.kill()
        process.wait()


async def test_a_part_that_is_killed_at_its_start_is_started_again(tmp_path: Path) -> None:
    """A child process that a signal kills during its start is restarted a few times; one that exits is an error."""
    there = tmp_path / "there"

    async def ready() -> bool:
        return there.exists()

    def child(script: str) -> Child:
        return Child("part", ["sh", "-c", script], tmp_path / "log", ready=ready)

    supervisor = Supervisor()
    await supervisor.start(child(f"echo start >> {tmp_path}/log; [ $(grep -c . {tmp_path}/log) -lt 3 ] && kill -9 $$; "
                                 f"touch {there}; exec sleep 1000"))  # fmt: skip
    assert (tmp_path / "log").read_text().split() == ["start"] * 3
    await supervisor.stop()
    there.unlink()
    with pytest.raises(StackError, match="exited with code -9 at its start"):
        await Supervisor().start(child("kill -9 $$"))
    # Lines of earlier starts are not shown: they would look like the cause.
    with pytest.raises(StackError, match=r"exited with code 3 at its start\nit has written nothing to .*/log$"):
        await Supervisor().start(child("exit 3"))


async def test_a_part_that_never_starts_ends_the_stack(tmp_path: Path) -> None:
    """Three ends in a row at its start are an error with the last lines of its log, whose long lines are shortened."""
    supervisor = Supervisor()
    words = "a" * 900 + "the cause"
    await supervisor.start(Child("part", ["sh", "-c", f"echo {words}; exit 7"], tmp_path / "log"))
    with pytest.raises(StackError, match=r"^part: ended at its start 3 times .* 7\n(a+ \.\.\. a+the cause\n?)+$"):
        await asyncio.wait_for(supervisor.until_failed(), 60)
    assert (tmp_path / "log").read_text().count("the cause") == 3
    await supervisor.stop()


@pytest.mark.parametrize("checked", [True, False])
async def test_a_part_that_has_worked_is_started_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, checked: bool
) -> None:
    """A part that was ready once, or ran for a while, may fail later, as on a full disk: it does not end the stack."""
    monkeypatch.setattr("infra.stack.supervisor._START_S", 0.2)
    log, works = tmp_path / "log", tmp_path / "works"
    works.touch()

    async def ready() -> bool:
        return True

    supervisor = Supervisor()
    command = ["sh", "-c", f"echo start; test -e {works} && exec sleep 1000"]
    await supervisor.start(Child("part", command, log, ready=ready if checked else None))
    await asyncio.sleep(0.0 if checked else 0.4)
    works.unlink()
    assert supervisor.children[0].process is not None
    supervisor.children[0].process.kill()
    failed = asyncio.create_task(supervisor.until_failed())
    while log.read_text().count("start") < 5:
        assert not failed.done()
        await asyncio.sleep(0.05)
    failed.cancel()
    await supervisor.stop()
