"""The notice to stop: scripts as users of Slurm, Kubernetes and SkyPilot write them save, and get it once."""

import contextlib
import shutil
import socket
import subprocess
import sys
from dataclasses import dataclass, field, replace

import pytest
from temporalio.client import WorkflowFailureError

from agent.tasks import RunFolder
from agent.termination import ObservedProcess, TaskNotice, read_processes
from domain.protocol.machines import NodeOutcome
from tests.agent.harness import Lab, description, until_async

TRAIN = """
import os, signal, sys, time
name = sys.argv[1] if len(sys.argv) > 1 else "t"
told = []
def notice(*_):
    with open(f"{name}.notices", "a") as file:
        file.write("x")
    told.append(1)
signal.signal(signal.SIGTERM, notice)
step = 0
while not told:
    step += 1
    print(name, "step", step, flush=True)
    if step == 2:
        open(f"{name}.ready", "w").close()
    time.sleep(0.05)
print(name, "saving", flush=True)
end_s = time.monotonic() + 0.8
while time.monotonic() < end_s:
    time.sleep(0.05)
    print(name, "still saving", flush=True)
open(f"{name}.saved", "w").write("all")
print(name, "saved", flush=True)
sys.exit(7)
"""
"""A trainer that counts its notices, saves for a while, prints meanwhile, and ends with code 7."""
LAUNCH = """
import subprocess, sys
sys.exit(subprocess.run(sys.argv[1:]).returncode)
"""
"""A launcher without a handler for SIGTERM, as `conda run` and `accelerate launch` are."""
FORWARD = """
import signal, subprocess, sys
child = subprocess.Popen(sys.argv[1:])
signal.signal(signal.SIGTERM, lambda *_: child.send_signal(signal.SIGTERM))
code = child.wait()
sys.exit(code if code >= 0 else 128 - code)
"""
"""A launcher that passes SIGTERM on and waits, as srun and torchrun do."""


@dataclass(frozen=True)
class Case:
    """A script, and what it must leave."""

    script: str
    notices: dict[str, int] = field(default_factory=lambda: {"t": 1})
    """Number of notices that each program counted. All of them saved."""
    status: str = "exit code 7"
    log: str = "t saved"
    """A part of the task's output, or of `log` in its folder."""


BASH, DASH = "#!/bin/bash\n", "#!/bin/sh\n"
T = "$PY train.py"
READ = 'while read -r line; do echo "$line" >> log; done'
FORWARDING = "trap 'echo x >> h.notices; kill -TERM $PID; wait $PID; rc=$?; echo all > h.saved; exit $rc' TERM\n"
CASES = {
    "exec": Case(BASH + f"exec {T}"),
    "plain, bash": Case(BASH + f"{T}\necho never"),
    "plain, dash": Case(DASH + f"{T}\necho never"),
    "bash -c": Case(f"bash -c '{T}; echo never'\necho never"),
    "three shells": Case(f"sh -c \"bash -c '{T}; true'; true\"\ntrue"),
    "env, nice, stdbuf": Case(f"env A=1 nice -n 1 nohup {T}\ntrue"),
    "tee": Case(f"{T} 2>&1 | tee log"),
    "tee, dash": Case(DASH + f"{T} 2>&1 | tee log"),
    "tee, pipefail": Case(BASH + f"set -euo pipefail\n{T} 2>&1 | tee log"),
    "two readers": Case(f"{T} 2>&1 | sed -u s/step/STEP/ | tee log"),
    "tee of a group": Case(f"{{ echo start; {T}; echo never; }} 2>&1 | tee log"),
    "process substitution": Case(BASH + f"{T} > >(tee log) 2>&1\ntrue"),
    "exec into tee": Case(BASH + f"exec > >(tee -a log) 2>&1\n{T}\ntrue"),
    "tee in the background": Case(BASH + f"{T} 2>&1 | tee log &\nwait"),
    "while read": Case(f"{T} 2>&1 | {READ}"),
    "lastpipe": Case(
        BASH + f"shopt -s lastpipe\n{T} 2>&1 | {READ}\nsleep 1; echo after >> log", status="exit code 0", log="after"
    ),
    "lastpipe, again and again": Case(
        BASH + f"shopt -s lastpipe\nwhile true; do {T} 2>&1 | {READ}; sleep 0.5; done", status="signal 15"
    ),
    "reader with an inner loop": Case(
        f"echo 1 > list\n{T} | "
        "{ while read -r x; do until [ -e t.notices ]; do sleep 0.1; done; done < list; cat > log; }"
    ),
    "cat into train": Case(f"echo data > list\ncat list | {T}\ntrue"),
    "endless writer": Case(f"yes | {T}\ntrue"),
    "input by process substitution": Case(BASH + f"{T} < <(yes)\ntrue"),
    "loop over a list": Case(f"echo t > list\ncat list | while read -r n; do {T} $n; done"),
    "xargs": Case(f"echo t | xargs -n1 {T}\ntrue"),
    "subshell": Case(f"(cd . && {T}; true)\ntrue"),
    "wait": Case(BASH + f"{T} &\nwait"),
    "wait, dash": Case(DASH + f"{T} &\nwait"),
    "two in the background": Case(BASH + f"{T} a &\n{T} b &\nwait", {"a": 1, "b": 1}, log="saved"),
    "tail in front": Case(BASH + f"touch log\n{T} > log 2>&1 &\ntail -f log"),
    "polling": Case(BASH + f"{T} &\nPID=$!\nwhile kill -0 $PID; do sleep 0.2; done"),
    "sidecar": Case(BASH + f"(trap 'echo x >> side.notices; echo all > side.saved; exit' TERM; while :; do sleep 0.1; "
                    f"[ ! -e t.saved ] || echo after >> side.after; done) &\n{T}\ntrue", {"t": 1, "side": 1}),
    "trap forwards": Case(BASH + FORWARDING + f"{T} &\nPID=$!\nwait $PID", {"t": 1, "h": 1}),
    "trap forwards, dash": Case(DASH + FORWARDING + f"{T} &\nPID=$!\nwait $PID", {"t": 1, "h": 1}),
    "trap forwards and does not wait": Case(
        BASH + f"trap 'echo x >> h.notices; echo all > h.saved; kill -TERM $PID' TERM\n{T} &\nPID=$!\nwait $PID",
        {"t": 1, "h": 1},
    ),
    "trap saves itself": Case(
        BASH + "save() { echo x >> h.notices; echo saving; cp state copy || exit 3; sleep 0.5; "
        "$PY -c 'print(\"python saved\")' || exit 4; (exit 0) || exit 5; echo all > h.saved; exit 0; }\n"
        "trap save TERM\necho 1 > state; touch t.ready\nwhile true; do sleep 0.1; done",
        {"h": 1}, "exit code 0", "python saved",
    ),
    "trap lets the step end": Case(
        BASH + "trap 'echo x >> h.notices; stop=1' TERM\ntouch t.ready\nwhile [ -z \"$stop\" ]; do\n"
        "$PY -c 'import time; time.sleep(1)' || exit 3\ndone\necho all > h.saved; echo ended",
        {"h": 1}, "exit code 0", "ended",
    ),
    "trap waits for a command": Case(
        BASH + f"trap 'echo x >> h.notices; echo all > h.saved; exit 9' TERM\n{T}\ntrue",
        {"t": 1, "h": 1}, "exit code 9",
    ),
    "ignored by the shell": Case(BASH + f"trap '' TERM\n{T}\nexit 5", status="exit code 5"),
    "inner script with a trap": Case(
        f"cat > in.sh <<'E'\n{BASH}{FORWARDING}{T} &\nPID=$!\nwait $PID\nE\nchmod +x in.sh\n./in.sh\ntrue",
        {"t": 1, "h": 1},
    ),
    "timeout": Case(f"timeout 60 bash -c '{T}; true'\ntrue", log="t saved"),
    "timeout --foreground": Case(f"timeout --foreground 60 sh -c '{T}; true'\ntrue"),
    "make": Case(f"printf 'train:\\n\\t{T} 2>&1 | tee log\\n' | sed 's/[$]PY/$$PY/' > Makefile\nmake train\ntrue"),
    "setsid": Case(f"setsid -w {T}\ntrue"),
    "launcher": Case(f"$PY launch.py {T}\ntrue"),
    "launcher with tee": Case(f"$PY launch.py bash -c '{T} 2>&1 | tee log'\ntrue"),
    "srun": Case(f"$PY forward.py {T}\ntrue"),
    "srun and wait": Case(BASH + f"$PY forward.py {T} &\nwait"),
    "srun of a shell": Case(BASH + f"$PY forward.py bash -c '{T}; true' | tee log"),
    "function": Case(BASH + f"run() {{ local x=1; {T}; }}\nrun | tee log\ntrue"),
    "here document": Case(f"bash -s <<'E'\n{T}\nE"),
    "daemonized": Case(BASH + f"($PY train.py d > d.log 2>&1 &)\n{T}\ntrue", {"t": 1, "d": 1}),
}  # fmt: skip
"""Scripts that train until they get the notice."""
AFTER = f"{T} | {READ}\nsleep 1; echo after >> log"
if shutil.which("zsh"):
    CASES["zsh"] = Case("#!/usr/bin/env zsh\nsetopt shwordsplit\n" + AFTER, status="exit code 0", log="after")
if shutil.which("ksh93"):
    CASES |= {
        "ksh": Case("#!/usr/bin/env ksh93\n" + AFTER, status="exit code 0", log="after"),
        "ksh, tee": Case(f"#!/usr/bin/env ksh93\n{T} 2>&1 | tee log"),
    }


@pytest.mark.rotating
async def test_scripts_save_when_they_are_told(lab: Lab) -> None:
    """Each script's programs save within the grace and count one notice each. Status and notice are reported."""
    config = lab.config(cpus_milli=64_000, cgroup=False, ports=(21100, 21399))
    names = {f"s{number}": name for number, name in enumerate(CASES)}
    jobs = {
        job: {"role": "worker", "tasks": 1, "script": CASES[name].script, "master_machine": config.machine,
              "env": {"PY": f"{sys.executable} -I -S -u"}}
        for job, name in names.items()
    }  # fmt: skip
    place = {"task": 0, "machine": config.machine, "rank": 0, "world_size": 1, "node_rank": 0, "local_rank": 0}
    launch = description(
        lab.region,
        config,
        jobs=jobs,
        tasks=[{**place, "job": job, "local_world_size": 1} for job in jobs],
        grace_s=12.0,
        files={"train.py": TRAIN, "launch.py": LAUNCH, "forward.py": FORWARD},
    )
    lab.write(launch)
    runs = {job: lab.folder_of(launch, config, job) for job in jobs}

    def ended() -> dict[str, str]:
        return {name: runs[job].output.read_text() for job, name in names.items() if runs[job].exit() is not None}

    async with lab.agent(config):
        await lab.prepare(launch, config.machine)
        running = await lab.run(launch, config.machine)
        # An attempt one of whose tasks fails is stopped, so that the others would never be ready.
        await until_async(
            lambda: all(_is_ready(runs[job], CASES[name]) or ended() for job, name in names.items()), 150.0
        )
        assert not ended()
        stopped = await lab.stop(launch, config.machine, 12.0)
        with contextlib.suppress(WorkflowFailureError):  # On a busy machine it is tried again, and refused.
            await running.result(NodeOutcome)
    statuses = {exit_.job: exit_.status for exit_ in stopped.exits}
    wrong = [
        (name, problem) for job, name in names.items() if (problem := _problem(runs[job], CASES[name], statuses[job]))
    ]
    assert stopped.stopped
    assert not wrong, "\n".join(f"{name}: {problem}" for name, problem in wrong)


def _is_ready(run: RunFolder, case: Case) -> bool:
    programs = case.notices.keys() - {"h", "side"} or {"t"}
    return all((run.work / f"{name}.ready").exists() for name in programs)


def _problem(run: RunFolder, case: Case, status: str) -> str | None:
    """Returns what is wrong with what a script left; None: nothing is."""
    counted = {path.stem: path.read_text().count("x") for path in run.work.glob("*.notices")}
    saved = {path.stem for path in run.work.glob("*.saved") if path.read_text().strip() == "all"}
    log = run.work / "log"
    text = run.output.read_text() + (log.read_text() if log.exists() else "")
    end = run.exit()
    noticed = end is not None and end.noticed
    if (counted, saved, status) == (case.notices, set(case.notices), case.status) and case.log in text and noticed:
        return None
    return f"notices {counted}, saved {sorted(saved)}, {status}, {noticed=}: {text[-300:]!r}"


def test_pipelines_of_socket_pairs_are_found() -> None:
    """ksh93 connects the commands of a pipeline by pairs of sockets: one command writes, and the other reads."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        reader = subprocess.Popen(["sleep", "60"], stdin=ours)
        writer = subprocess.Popen(["sleep", "60"], stdin=subprocess.DEVNULL, stdout=theirs)
        try:
            found = read_processes([reader.pid, writer.pid])
        finally:
            for process in (reader, writer):
                process.kill()
                process.wait()
    assert found[reader.pid].reads in found[writer.pid].writes
    assert not found[reader.pid].writes
    assert found[writer.pid].reads is None


def test_the_status_of_a_trainer_counts_although_python_has_removed_its_handler() -> None:
    """The processes are looked at while the trainer, which timeout(1) has orphaned, is about to exit with code 7."""
    shell = ObservedProcess(10, 1, parent=1, group=10, is_shell=True)
    timeout, trainer = (
        ObservedProcess(11, 1, parent=10, group=11, catches=True),
        ObservedProcess(12, 1, 11, 11, catches=True),
    )
    notice = TaskNotice(10, now_s=5.0)
    assert notice.due({one.pid: one for one in (shell, timeout, trainer)}, 5.0, 17.0) == [10, 11]
    notice.due({12: replace(trainer, parent=1, catches=False)}, 5.25, 17.0)
    assert notice.status(15, {10: 15, 11: 15, 12: 7 << 8}) == 7 << 8
