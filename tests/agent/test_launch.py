"""Launch descriptions, the environment of tasks, secrets, ports and reports."""

import base64
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest
from nacl.public import PublicKey, SealedBox
from pydantic import ValidationError

from agent import sealed
from agent.config import AgentConfig
from agent.launch import environment
from agent.logs import Masker
from agent.ports import NoFreePort, bindable, reserve
from agent.progress import NoticeReader, last_sign_s, read_progress
from agent.state import StateFolder
from domain.launch import LaunchDescription
from domain.reported import CadenceReport, LoadReport, NoticeReport, TaskProgress
from tests.agent.harness import run_folder

PLACE = {
    "job": "main",
    "task": 1,
    "machine": "r1/c1/m1",
    "rank": 1,
    "world_size": 2,
    "node_rank": 0,
    "local_rank": 1,
    "local_world_size": 2,
    "slots": [4, 5],
}
LAUNCH: dict[str, Any] = {
    "workload_id": "wl-1",
    "name": "resnet",
    "tenant": "vision",
    "attempt": 3,
    "region": "r1",
    "checkpoint": {
        "interval_s": 600.0,
        "grace_s": 0.5,
        "keep": 2,
        "uri": "file:///b/checkpoints/wl-1/",
        "machine_hazard_per_h": 0.025,
    },
    "tables": {"raw-text": "file:///b/tables/raw-text/", "ads.clicks": "file:///b/tables/ads.clicks/"},
    "stale_tables": {"ads.clicks": "2026-11-22T04:00:00.5+01:00"},
    "jobs": {
        "main": {
            "role": "worker",
            "tasks": 2,
            "argv": ["python", "train.py"],
            "env": {"LR": "0.1", "MIZZEN_WORKLOAD": "forged", "LANG": "C", "RANK": "7", "CUDA_VISIBLE_DEVICES": "0"},
            "master_machine": "r1/c1/m1",
        },
        "param-server": {"role": "ps", "tasks": 1, "script": "exec ./ps", "master_machine": "r1/c1/m2"},
    },
    "tasks": [PLACE, PLACE | {"job": "param-server", "task": 0, "slots": []}],
}

NOTHING_SECRET = Masker(())


def test_the_environment_is_exactly_the_documented_one() -> None:
    """A task gets the documented variables, its user's variables and secrets, and none of the agent's environment."""
    launch = LaunchDescription.model_validate(LAUNCH)
    env = environment(
        launch,
        launch.on_machine("r1/c1/m1")[0],
        masters={"main": "10.0.0.1:7001", "param-server": "10.0.0.2:7002"},
        home=Path("/runs/x/work"),
        report=Path("/runs/x/report/report.json"),
        interval_file=Path("/runs/x/interval.json"),
        deadline_file=Path("/runs/x/deadline.json"),
        python="/venv/bin/python",
        secrets={"TOKEN": "hunter2", "MIZZEN_TENANT": "forged"},
        platform="aws-spot",
    )
    assert env == {
        "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/runs/x/work",
        "LANG": "C",
        "LR": "0.1",
        "TOKEN": "hunter2",
        "MIZZEN_WORKLOAD": "wl-1",
        "MIZZEN_WORKLOAD_NAME": "resnet",
        "MIZZEN_TENANT": "vision",
        "MIZZEN_ATTEMPT": "3",
        "MIZZEN_JOB": "main",
        "MIZZEN_TASK": "1",
        "MIZZEN_TASKS": "2",
        "MIZZEN_REGION": "r1",
        "MIZZEN_MACHINE": "r1/c1/m1",
        "MIZZEN_RUN_ID": "wl-1.3.main.1",
        "MIZZEN_CHECKPOINT_URI": "file:///b/checkpoints/wl-1/",
        "MIZZEN_CHECKPOINT_INTERVAL_S": "600",
        "MIZZEN_CHECKPOINT_KEEP": "2",
        "MIZZEN_GRACE_S": "0.5",
        "MIZZEN_REPORT": "/runs/x/report/report.json",
        "MIZZEN_INTERVAL_FILE": "/runs/x/interval.json",
        "MIZZEN_DEADLINE_FILE": "/runs/x/deadline.json",
        "MIZZEN_PYTHON": "/venv/bin/python",
        "MIZZEN_TABLE_RAW_TEXT": "file:///b/tables/raw-text/",
        "MIZZEN_TABLE_ADS__CLICKS": "file:///b/tables/ads.clicks/",
        "MIZZEN_TABLE_ADS__CLICKS_COMPLETE_UNTIL": "2026-11-22T03:00:00.500000Z",
        "MIZZEN_JOB_MAIN_ADDR": "10.0.0.1:7001",
        "MIZZEN_JOB_PARAM_SERVER_ADDR": "10.0.0.2:7002",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "4,5",
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "NODE_RANK": "0",
        "MIZZEN_GANG_MACHINES": "1",
        "MIZZEN_MACHINE_HAZARD_PER_H": "0.025",
        "MIZZEN_PLATFORM": "aws-spot",
        "MASTER_ADDR": "10.0.0.1",
        "MASTER_PORT": "7001",
    }


def test_an_interval_that_nobody_asked_for_is_not_given() -> None:
    """Without a checkpoint interval in the workload's document, tasks compute their own."""
    checkpoint = {**LAUNCH["checkpoint"], "interval_s": None, "machine_hazard_per_h": None}
    launch = LaunchDescription.model_validate({**LAUNCH, "checkpoint": checkpoint})
    given = {"masters": {}, "home": Path("/h"), "report": Path("/r"), "interval_file": Path("/i"), "python": "py"} | {
        "deadline_file": Path("/d")
    }
    env = environment(launch, launch.on_machine("r1/c1/m1")[0], secrets={}, **given)  # type: ignore[arg-type]
    assert not {"MIZZEN_CHECKPOINT_INTERVAL_S", "MIZZEN_MACHINE_HAZARD_PER_H", "MIZZEN_PLATFORM"} & set(env)


def test_the_sdk_reads_the_same_environment() -> None:
    """`mizzen.environment` reads the variables that the agent sets."""
    from mizzen.environment import TaskEnvironment

    launch = LaunchDescription.model_validate(LAUNCH)
    place = launch.on_machine("r1/c1/m1")[1]
    given = {
        "masters": {"param-server": "[::1]:7002"},
        "home": Path("/h"),
        "report": Path("/r"),
        "interval_file": Path("/i"),
        "deadline_file": Path("/d"),
        "python": "py",
    }
    read = TaskEnvironment.from_environ(environment(launch, place, secrets={}, **given))  # type: ignore[arg-type]
    assert (read.workload, read.attempt, read.job, read.task, read.tasks) == ("wl-1", 3, "param-server", 0, 1)
    assert (read.checkpoint_interval_s, read.checkpoint_keep, read.grace_s) == (600.0, 2, 0.5)
    assert (read.gang_mtbf_s, read.machine_hazard_per_h, read.gang_machines) == (None, 0.025, 1)
    assert (read.gpus, read.master_addr, read.master_port) == ((), "[::1]", 7002)
    assert dict(read.job_addresses) == {"PARAM_SERVER": "[::1]:7002"}
    assert read.run_id == "wl-1.3.param-server.0"
    assert dict(read.tables_complete_until) == {"ADS__CLICKS": launch.stale_tables["ads.clicks"]}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"tasks": [PLACE | {"job": "other"}]}, "no such job"),
        ({"tasks": [PLACE | {"task": 2}]}, "no such job or task"),
        ({"tasks": [PLACE, PLACE]}, "listed twice"),
        ({"jobs": {"../x": LAUNCH["jobs"]["main"]}, "tasks": []}, "name"),
        ({"jobs": {"main": {"role": "w", "tasks": 2, "master_machine": "m"}}}, "argv or script"),
        ({"workload_id": "../wl"}, "workload_id"),
        ({"workdir": "../x"}, "workdir"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_launches_that_make_no_sense(change: dict[str, Any], said: str) -> None:
    """A description that refers to something missing, or could name another folder, is rejected with its field."""
    with pytest.raises(ValidationError, match=said):
        LaunchDescription.model_validate(LAUNCH | change)


def test_secrets_open_with_their_key_only() -> None:
    """A secret sealed for a machine opens only there; elsewhere it fails with an error that does not quote it."""
    key = sealed.new_key()
    box = SealedBox(PublicKey(base64.b64decode(sealed.public_key(key))))
    body = {"main": {"TOKEN": "hunter2"}}
    text = base64.b64encode(box.encrypt(json.dumps(body).encode())).decode()
    assert sealed.unseal([key], text) == body
    assert sealed.unseal([key], None) == {} and sealed.unseal([sealed.new_key(), key], text) == body
    for other, wrong in ((sealed.new_key(), text), (key, text[:-8]), (key, "no base64!")):
        with pytest.raises(sealed.CannotUnseal) as caught:
            sealed.unseal([other], wrong)
        assert "hunter2" not in str(caught.value)
    with pytest.raises(sealed.CannotUnseal):
        sealed.unseal([sealed.new_key(), key], base64.b64encode(box.encrypt(b'["a list"]')).decode())


# ------------------------------------------------------------------------------------------------------------ ports


def test_ports_are_reserved_once(tmp_path: Path) -> None:
    """An attempt and job always get the same port, even after a restart; different ones get different ports."""
    rng = random.Random(6)
    given: dict[tuple[str, str], int] = {}
    for _ in range(60):
        state = StateFolder(tmp_path)  # Opened again, as by a restarted agent.
        attempt = state.attempt(f"wl-{rng.randrange(4)}", rng.randrange(1, 3))
        job = f"job{rng.randrange(3)}"
        others = [a for a in state.attempts() if a.key != attempt.key]
        port = reserve(attempt, [job], (21000, 21049), others, lambda _: True)[job]
        assert given.setdefault((attempt.key, job), port) == port
    assert len(set(given.values())) == len(given)


def test_ports_that_are_in_use_or_used_up(tmp_path: Path) -> None:
    """A port that another program listens on is skipped, and an exhausted range is an error that names it."""
    state = StateFolder(tmp_path)
    busy = {21001, 21002}
    first = reserve(state.attempt("wl-1", 1), ["a"], (21001, 21003), [], lambda port: port not in busy)
    assert first == {"a": 21003}
    with pytest.raises(NoFreePort, match="21001 to 21003"):
        reserve(
            state.attempt("wl-2", 1), ["a"], (21001, 21003), [state.attempt("wl-1", 1)], lambda port: port not in busy
        )


def test_a_listening_port_is_not_bindable() -> None:
    """`bindable` is false for a port with a listener, and does not keep the port open."""
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert not bindable(port)
    assert bindable(port) and bindable(port)


# ---------------------------------------------------------------------------------------------------------- reports


def test_the_sdks_report_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A report that `mizzen.report` writes is read as progress."""
    from mizzen.report import Reporter

    run = run_folder(tmp_path)
    (run.path / "pid.json").write_text('{"started_at_s": 5.0}')
    reporter = Reporter(run.report)
    reporter.resumed(100)
    reporter.saved(150, 1234.5, 4096, 0.25)
    reporter.progress(160)
    reporter.flush()
    progress = read_progress(run, NOTHING_SECRET)
    assert progress.active_at_s == pytest.approx(run.report.stat().st_mtime)
    progress.active_at_s = None
    assert progress == TaskProgress(
        "main", 0, 160, 100, 150, 1234.5, 4096, 0.25, None, checkpoint_write_s=0.25, checkpoint_sent_bytes=4096
    )


def test_the_sdks_report_of_cadence_loading_and_notices_is_read(tmp_path: Path) -> None:
    """The cadence (W, C and mu), the load state and notices are read as the SDK reported them."""
    from mizzen.notices import Kind, Notice
    from mizzen.report import Reporter

    run = run_folder(tmp_path)
    reporter = Reporter(run.report)
    reader = NoticeReader(run, NOTHING_SECRET)
    assert reader.read() is None
    reporter.loading()
    assert read_progress(run, NOTHING_SECRET).load == LoadReport("started")
    reporter.load_failed(OSError("no such bucket" + "!" * 1000), skipped=2)
    load = read_progress(run, NOTHING_SECRET).load
    assert load is not None and (load.state, load.skipped) == ("failed", 2)
    assert load.error is not None and load.error.startswith("OSError: no such bucket") and len(load.error) == 500
    reporter.loaded(None, skipped=1)
    assert read_progress(run, NOTHING_SECRET).load == LoadReport("none", None, 1)
    reporter.loaded(100)
    assert (read_progress(run, NOTHING_SECRET).load, read_progress(run, NOTHING_SECRET).resumed_step) == (
        LoadReport("loaded"),
        100,
    )
    reporter.cadence(805.0, 30.0, float("inf"), 2.0, "hazard")
    assert read_progress(run, NOTHING_SECRET).cadence == CadenceReport(805.0, 30.0, None, 2.0, "hazard")
    reporter.saved(150, 1234.5, 4096, 0.25, write_s=3.0)
    assert read_progress(run, NOTHING_SECRET).checkpoint_write_s == 3.0
    reporter.noticed(Notice("aws", Kind.PREEMPT, 5.0, 125.0, True, "terminate"), "Save now.")
    told = NoticeReport("aws", "preempt", True, 5.0, 125.0, "terminate", "Save now.")
    assert read_progress(run, NOTHING_SECRET).notice == reader.read() == told
    assert told.takes_machine
    reporter.noticed(Notice("aws", Kind.REBALANCE, 6.0, None, False, "leave"))
    again = reader.read()
    assert again is not None and not again.takes_machine


@pytest.mark.parametrize(
    ("platform", "kind", "certain", "takes"),
    [
        ("gcp", "preempt", True, True),
        ("slurm", "walltime", True, True),
        ("gcp", "age-limit", True, True),
        ("aws", "preempt", False, False),
        ("aws", "stop", True, False),
        ("mizzen", "preempt", True, False),
        ("sigterm", "stop", True, False),
    ],
)
def test_a_signal_alone_is_no_word_of_the_platform(platform: str, kind: str, certain: bool, takes: bool) -> None:
    """A SIGTERM, which a launcher also sends to other ranks after a failure, does not count as a reclaimed machine."""
    assert NoticeReport(platform, kind, certain, 5.0).takes_machine is takes


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{",
        '{"step": "x", "checkpoint": 3, "resumed_step": true}',
        '{"step": -1, "checkpoint": {"at_s": NaN, "bytes": 1e999, "duration_s": -1}}',
        "[" * 50_000,
        " " * 100_000 + "{}",
        '{"step": 99999999999999999999}',
        '{"load": {"state": "eaten"}, "cadence": {"interval_s": "5"}, "notice": {"platform": "aws"}}',
        '{"load": [], "cadence": {"cost_s": 3}, "notice": {"platform": "a/b", "kind": "preempt", "at_s": 3}}',
        '{"notice": {"platform": "aws", "kind": "preempt", "at_s": 1e300}, "checkpoint": {"at_s": 1e300}}',
        '{"notice": {"platform": "aws", "kind": ["preempt"], "at_s": 3}, "load": {"state": ["failed"]}}',
    ],
)
def test_forged_reports_are_ignored(tmp_path: Path, text: str) -> None:
    """A malformed report is read as no progress, without an error."""
    run = run_folder(tmp_path)
    run.report.write_text(text)
    assert read_progress(run, NOTHING_SECRET) == TaskProgress("main", 0)


def test_words_of_a_forged_report_are_bounded_and_can_be_kept(tmp_path: Path) -> None:
    """Texts in a report are truncated, and characters that no database accepts are replaced."""
    run = run_folder(tmp_path)
    run.report.write_text(json.dumps({"load": {"state": "failed", "error": "a\0\ud800" + "b" * 9999}}))
    load = read_progress(run, NOTHING_SECRET).load
    assert load is not None and load.error == "a?" + "b" * 497


def test_words_of_a_report_are_masked(tmp_path: Path) -> None:
    """Texts in a report are masked like the output, even if the SDK has cut them within a secret."""
    run = run_folder(tmp_path)
    masker = Masker(["hunter2-the-long-one"])
    told = {"platform": "aws", "kind": "preempt", "at_s": 3.0, "words": "hunter2-the-long-one", "decision": "save"}
    body = {
        "load": {"state": "failed", "error": "no access with hunter2-the-long-one"},
        "cadence": {"interval_s": 5, "source": "hunter2-the-long-one"},
        "notice": told,
    }
    run.report.write_text(json.dumps(body))
    found = read_progress(run, masker)
    assert found.load == LoadReport("failed", "no access with ***")
    assert found.cadence is not None and found.cadence.source == "***"
    assert found.notice is not None and (found.notice.words, found.notice.decision) == ("***", "save")
    assert NoticeReader(run, masker).read() == found.notice
    unknown = read_progress(run, None)
    assert unknown.load == LoadReport("failed", "***") and "hunter2" not in str(unknown)
    for length in range(1, 20):
        error = "x" * (500 - length) + "hunter2-the-long-one"[:length]
        run.report.write_text(json.dumps({"load": {"state": "failed", "error": error}}))
        load = read_progress(run, masker).load
        assert load is not None and load.error == ("x" * (500 - length) + "***")[:500]


def test_a_report_that_is_no_file(tmp_path: Path) -> None:
    """A link in place of the report is not followed, and a pipe is not waited for."""
    run = run_folder(tmp_path)
    (tmp_path / "other.json").write_text('{"step": 1}')
    run.report.symlink_to(tmp_path / "other.json")
    assert read_progress(run, NOTHING_SECRET).step is None
    run.report.unlink()
    os.mkfifo(run.report)
    assert read_progress(run, NOTHING_SECRET).step is None


def test_signs_of_life(tmp_path: Path) -> None:
    """The start, output and reports are signs of life; a file time in the future counts as now."""
    run = run_folder(tmp_path)
    assert last_sign_s(run) is None
    (run.path / "pid.json").write_text('{"started_at_s": 50.0}')
    assert last_sign_s(run) == 50.0
    run.output.touch()
    os.utime(run.output, (70.0, 70.0))
    assert last_sign_s(run) == 70.0
    run.report.touch()
    os.utime(run.report, (60.0, 60.0))
    assert last_sign_s(run) == 70.0
    os.utime(run.report, (1e11, 1e11))
    assert (last_sign_s(run) or 1e11) <= time.time()


# -------------------------------------------------------------------------------------------------------- the state


def test_the_state_folder_remembers(tmp_path: Path) -> None:
    """The key, incarnation and stopped attempts outlive the agent; stop numbers never decrease; the key is private."""
    first, second = StateFolder(tmp_path), StateFolder(tmp_path)
    assert first.private_key() == second.private_key()
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    assert first.incarnation() == second.incarnation()
    first.stop_attempts("wl-1", 4)
    second.stop_attempts("wl-1", 2)
    assert (second.stopped_attempt("wl-1"), second.stopped_attempt("wl-2")) == (4, 0)
    (tmp_path / "incarnation").write_text('{"boot_id": "an earlier boot", "chance": "x"}')
    assert first.incarnation() not in ("an earlier boot.x", second.path)
    assert first.incarnation() == second.incarnation()
    for bad in ("../x", "", "a/b", "."):
        with pytest.raises(ValueError, match="workload id"):
            first.attempt(bad, 1)


def test_stops_are_forgotten_after_their_time(tmp_path: Path) -> None:
    """Old records of stopped attempts are removed, but recent ones, and those whose run folder exists, are kept."""
    state = StateFolder(tmp_path)
    for workload in ("old", "recent", "here", "reserved"):
        state.reserve_stop(workload)
    for workload in ("old", "recent", "here"):
        state.stop_attempts(workload, 3)
    state.attempt("here", 3).save_ports({})
    for name in ("old", "here", "reserved.reserve"):
        os.utime(tmp_path / "stopped" / name, (1000.0, 1000.0))
    state.forget_stopped(3600.0)
    assert sorted(path.name for path in (tmp_path / "stopped").iterdir()) == ["here", "recent"]
    assert (state.stopped_attempt("here"), state.stopped_attempt("old")) == (3, 0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"machine": "r1/other/m1"}, "machine"),
        ({"ports": (5, 4)}, "ports 5 to 4"),
        ({"ports": (0, 70000)}, "ports"),
        ({"run_as": "nobody-of-this-name"}, "run_as"),
        ({"region": "R1"}, "region"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_configurations_that_make_no_sense(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    """An invalid configuration is rejected with its field and value."""
    base = {
        "machine": "r1/c1/m1",
        "region": "r1",
        "cluster": "c1",
        "rack": "k",
        "cpus_milli": 1,
        "memory_bytes": 1,
        "address": "a",
        "ports": (1, 2),
        "state_dir": tmp_path,
    }
    AgentConfig.model_validate(base)
    with pytest.raises(ValidationError, match=said):
        AgentConfig.model_validate(base | change)
