"""The report to the agent, the task's environment, SIGTERM handling, and the imports of the SDK."""

import json
import os
import signal
import subprocess
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path

import pytest

import mizzen
from mizzen.environment import TaskEnvironment
from mizzen.report import MIN_PERIOD_S, Reporter

SDK = Path(mizzen.__file__).parents[1]


def run(script: str, *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a script whose import path has the SDK but no other code of this repository."""
    code = f"import sys; sys.path.insert(0, {str(SDK)!r})\n{script}"
    environment = {"PATH": os.environ["PATH"], **variables}
    command = [sys.executable, "-W", "error", *flags, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_checkpointing_needs_the_standard_library_only(tmp_path: Path) -> None:
    """Without site-packages, a state of bytes and JSON values saves and loads; numpy is not imported."""
    script = f"""
import mizzen.checkpoint, mizzen.environment, mizzen.notices, mizzen.report
checkpointer = mizzen.checkpoint.Checkpointer({str(tmp_path)!r})
checkpointer.save(3, {{"raw": b"x", "rng": [1, 2.5, None]}})
assert checkpointer.load_latest().state == {{"raw": b"x", "rng": [1, 2.5, None]}}
outside = [name for name in sys.modules if name.split(".")[0] not in {{*sys.stdlib_module_names, "mizzen", "__main__"}}]
assert outside == [], outside
"""
    ended = run(script, "-S", "-I")
    assert ended.returncode == 0, ended.stderr


def test_arrays_without_numpy_are_an_error_and_not_damage(tmp_path: Path) -> None:
    """If numpy is missing, loading arrays is an error that says so; it does not fall back to an older checkpoint."""
    import numpy as np

    mizzen.Checkpointer(tmp_path, attempt=1, settings=mizzen.CheckpointSettings(checksum="sha256")).save(
        1, {"w": np.zeros(3)}
    )
    ended = run(f"import mizzen; mizzen.Checkpointer({str(tmp_path)!r}, attempt=2).load_latest()", "-S", "-I")
    assert ended.returncode == 1
    assert "install numpy to load it" in ended.stderr


def test_the_public_names() -> None:
    """`mizzen` has exactly these public names, and imports their modules only on first use."""
    assert set(mizzen.__all__) == {
        "CheckpointSettings", "Checkpointer", "Executor", "TaskEnvironment", "World", "__version__", "exit_preempted",
        "open_checkpoints", "preempted", "progress", "world",
    }  # fmt: skip
    for name in mizzen.__all__:
        assert getattr(mizzen, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = mizzen.nothing
    for package in ("mizzen", "mizzen.checkpoint"):
        script = f"import {package}; assert not [n for n in sys.modules if n.startswith('{package}.')]"
        ended = run(script, "-S", "-I")
        assert ended.returncode == 0, ended.stderr
    slow = {"asyncio", "concurrent.futures", "datetime", "http.client", "logging", "pickle", "tempfile", "uuid"}
    ended = run(f"import mizzen; mizzen.Checkpointer; assert not {slow} & set(sys.modules)", "-S", "-I")
    assert ended.returncode == 0, ended.stderr


def test_sigterm_sets_the_flag_and_calls_the_handler_before(tmp_path: Path) -> None:
    """SIGTERM sets `preempted`, makes a save due, and calls each of the user's handlers once. The process continues."""
    script = f"""
import os, signal, mizzen
called = []
signal.signal(signal.SIGTERM, lambda number, frame: called.append("before"))
checkpointer = mizzen.Checkpointer({str(tmp_path)!r}, interval_s=1000)
mizzen.Checkpointer({str(tmp_path)!r})
ours = signal.getsignal(signal.SIGTERM)
signal.signal(signal.SIGTERM, lambda number, frame: (called.append("over"), ours(number, frame)))
checkpointer = mizzen.Checkpointer({str(tmp_path)!r}, interval_s=1000)
assert not mizzen.preempted() and not checkpointer.preempted and not checkpointer.should_save(1)
os.kill(os.getpid(), signal.SIGTERM)
assert mizzen.preempted() and checkpointer.preempted and checkpointer.should_save(1)
assert called == ["over", "before"], called
checkpointer.save(1, {{"step": 1}})
assert not checkpointer.should_save(1)
mizzen.exit_preempted()
"""
    ended = run(script)
    assert ended.returncode == 143, ended.stderr


def test_a_checkpointer_outside_the_main_thread_works(tmp_path: Path) -> None:
    """In another thread, where no signal handler can be set, saving works."""
    script = f"""
import threading, mizzen
def work():
    mizzen.Checkpointer({str(tmp_path)!r}).save(1, {{"step": 1}})
    print("saved")
thread = threading.Thread(target=work)
thread.start()
thread.join()
"""
    ended = run(script)
    assert ended.stdout == "saved\n", ended.stderr


def test_the_report_holds_progress_and_checkpoints(tmp_path: Path) -> None:
    """The report has the current step, the resumed step and the last save; at a normal exit it has the last step."""
    path = tmp_path / "report.json"
    script = f"""
import json, mizzen
def read():
    with open({str(path)!r}) as file: return json.load(file)
checkpointer = mizzen.Checkpointer({str(tmp_path / "c")!r})
assert checkpointer.load_latest() is None
assert (read()["step"], read()["resumed_step"], read()["checkpoint"]) == (None, None, None)
for step in range(1, 501):
    mizzen.progress(step)
manifest = checkpointer.save(500, {{"a": b"12345"}})
assert read()["step"] == 500
assert read()["checkpoint"].pop("duration_s") > 0
assert {{"step": 500, "at_s": manifest.created_at_s, "bytes": 5}}.items() <= read()["checkpoint"].items()
assert checkpointer.load_latest().step == 500
assert read()["resumed_step"] == 500
for step in range(501, 601):
    mizzen.progress(step)
"""
    ended = run(script, MIZZEN_REPORT=str(path))
    assert ended.returncode == 0, ended.stderr
    assert json.loads(path.read_text())["step"] == 600
    assert [entry.name for entry in tmp_path.iterdir() if "tmp" in entry.name] == []


def test_the_last_step_is_reported_on_leaving_after_a_notice(tmp_path: Path) -> None:
    """After SIGTERM each step is written to the report immediately."""
    path = tmp_path / "report.json"
    script = f"""
import json, os, signal, mizzen
checkpointer = mizzen.Checkpointer({str(tmp_path / "c")!r})
for step in range(1, 100):
    mizzen.progress(step)
os.kill(os.getpid(), signal.SIGTERM)
mizzen.progress(100)
with open({str(path)!r}) as file: assert json.load(file)["step"] == 100
mizzen.exit_preempted()
"""
    ended = run(script, MIZZEN_REPORT=str(path))
    assert ended.returncode == 143, ended.stderr


def test_threads_report_beside_each_other(tmp_path: Path) -> None:
    """Concurrent reports of saves and steps lose no updates and leave no temporary files."""
    path = tmp_path / "report.json"
    reporter = Reporter(path, clock=lambda: 0.0)
    reporter.cadence(5.0, 0.1, 60.0, None, "platform")

    def save() -> None:
        for step in range(1, 201):
            reporter.saved(step, 1.0, 10, 0.1, 0.2)
            json.loads(path.read_text())

    threads = [threading.Thread(target=save) for _ in range(3)]
    for thread in threads:
        thread.start()
    for step in range(1, 1001):
        reporter.progress(step)
    for thread in threads:
        thread.join()
    reporter.flush()
    written = json.loads(path.read_text())
    assert (written["step"], written["checkpoint"]["step"], written["cadence"]["interval_s"]) == (1000, 200, 5.0)
    assert list(tmp_path.iterdir()) == [path]


def test_steps_are_written_a_few_times_a_second(tmp_path: Path) -> None:
    """A thousand steps in one second cause at most six writes of the report, and `flush` writes the last step."""
    now_s = 0.0
    path = tmp_path / "report.json"
    reporter = Reporter(path, clock=lambda: now_s)
    written: list[int] = []
    for step in range(1, 1001):
        now_s = step / 1000
        reporter.progress(step)
        if not written or json.loads(path.read_text())["step"] != written[-1]:
            written.append(json.loads(path.read_text())["step"])
    assert written[0] == 1
    assert 3 <= len(written) <= 1 + 1 / MIN_PERIOD_S
    reporter.flush()
    assert json.loads(path.read_text())["step"] == 1000


def test_a_report_that_cannot_be_written_stops_nothing(tmp_path: Path) -> None:
    """If the report cannot be written, one error is logged and the training continues."""
    ended = run("import mizzen; mizzen.progress(1); mizzen.progress(2)", MIZZEN_REPORT=str(tmp_path / "no" / "r.json"))
    assert ended.returncode == 0
    assert ended.stderr.count("cannot write the report") == 1


def test_a_forked_child_does_not_report_for_its_parent(tmp_path: Path) -> None:
    """A forked child, such as a data loader, does not change the report."""
    path = tmp_path / "report.json"
    script = """
import os, mizzen
mizzen.progress(1)
if os.fork() == 0:
    mizzen.report.saved(99, 1.0, 1, 1.0)
    sys.exit()
os.wait()
"""
    ended = run("import mizzen.report\n" + script, MIZZEN_REPORT=str(path))
    assert ended.returncode == 0, ended.stderr
    assert json.loads(path.read_text())["checkpoint"] is None


def test_the_environment_is_read_into_one_value() -> None:
    """Each documented variable is parsed to its type; tables and job addresses are mappings by name."""
    told = TaskEnvironment.from_environ(
        {
            "MIZZEN_WORKLOAD": "wl-1", "MIZZEN_WORKLOAD_NAME": "digits", "MIZZEN_TENANT": "vision",
            "MIZZEN_ATTEMPT": "2", "MIZZEN_JOB": "trainer", "MIZZEN_TASK": "1", "MIZZEN_TASKS": "4",
            "MIZZEN_REGION": "east", "MIZZEN_MACHINE": "east/a/m1", "MIZZEN_RUN_ID": "wl-1.2.trainer.1",
            "MIZZEN_CHECKPOINT_URI": "file:///c", "MIZZEN_CHECKPOINT_INTERVAL_S": "5", "MIZZEN_CHECKPOINT_KEEP": "2",
            "MIZZEN_GANG_MTBF_S": "10800", "MIZZEN_MACHINE_HAZARD_PER_H": "0.04", "MIZZEN_GANG_MACHINES": "2",
            "MIZZEN_PLATFORM": "aws-spot",
            "MIZZEN_GRACE_S": "10.5", "MIZZEN_REPORT": "/r.json", "MIZZEN_TABLE_RAW_TEXT": "file:///tables/raw%20text",
            "MIZZEN_TABLE_ADS__CLICKS": "file:///tables/ads.clicks",
            "MIZZEN_TABLE_ADS__CLICKS_COMPLETE_UNTIL": "2026-11-22T03:00:00.5Z",
            "MIZZEN_JOB_TRAINER_ADDR": "10.0.0.1:5000", "MIZZEN_JOB_PARAMETER_SERVER_ADDR": "10.0.0.2:5001",
            "CUDA_VISIBLE_DEVICES": "2,3", "RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
            "NODE_RANK": "0", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5000",
        }
    )  # fmt: skip
    assert told == TaskEnvironment(
        workload="wl-1", workload_name="digits", tenant="vision", attempt=2, job="trainer", task=1, tasks=4,
        region="east", machine="east/a/m1", run_id="wl-1.2.trainer.1", checkpoint_uri="file:///c",
        checkpoint_interval_s=5.0, checkpoint_keep=2, gang_mtbf_s=10800.0, machine_hazard_per_h=0.04, gang_machines=2,
        platform="aws-spot", grace_s=10.5, report="/r.json", gpus=("2", "3"), rank=1,
        world_size=4, local_rank=1, local_world_size=2, node_rank=0, master_addr="10.0.0.1", master_port=5000,
        tables={"RAW_TEXT": "file:///tables/raw%20text", "ADS__CLICKS": "file:///tables/ads.clicks"},
        tables_complete_until={"ADS__CLICKS": datetime(2026, 11, 22, 3, 0, 0, 500_000, tzinfo=UTC)},
        job_addresses={"TRAINER": "10.0.0.1:5000", "PARAMETER_SERVER": "10.0.0.2:5001"},
    )  # fmt: skip
    assert told.table("raw-text") == Path("/tables/raw text")
    assert told.table("ads.clicks") == Path("/tables/ads.clicks")
    with pytest.raises(KeyError, match="MIZZEN_TABLE_DIGITS is not set: the tables of this workload are: ADS__CL"):
        told.table("digits")


def test_a_bad_time_is_named() -> None:
    """COMPLETE_UNTIL of a table must have a time zone. Without that table's variable, it is a table of that name."""
    name = "MIZZEN_TABLE_A_COMPLETE_UNTIL"
    assert TaskEnvironment.from_environ({name: "file:///a"}).tables == {"A_COMPLETE_UNTIL": "file:///a"}
    for text in ("yesterday", "2026-11-22T03:00:00"):
        with pytest.raises(ValueError, match=f"{name}='{text}': must be a time with a time zone"):
            TaskEnvironment.from_environ({"MIZZEN_TABLE_A": "file:///a", name: text})


def test_nothing_told_is_a_process_on_its_own() -> None:
    """Missing and empty variables give the defaults of a single process outside a scheduler."""
    assert TaskEnvironment.from_environ({"MIZZEN_ATTEMPT": "", "RANK": ""}) == TaskEnvironment()


@pytest.mark.parametrize(
    ("variable", "text", "rule"),
    [
        ("MIZZEN_ATTEMPT", "two", "must be a whole number"),
        ("MIZZEN_ATTEMPT", "0", "must be a whole number, at least 1"),
        ("RANK", "-1", "must be a whole number, at least 0"),
        ("MIZZEN_CHECKPOINT_INTERVAL_S", "soon", "must be 0 or more seconds"),
        ("MIZZEN_CHECKPOINT_INTERVAL_S", "nan", "must be 0 or more seconds"),
        ("MIZZEN_MACHINE_HAZARD_PER_H", "-1", "must be 0 or more interruptions per hour"),
        ("MIZZEN_GANG_MACHINES", "0", "must be a whole number, at least 1"),
    ],
)
def test_a_bad_variable_is_named(variable: str, text: str, rule: str) -> None:
    """For an invalid environment variable, the error has the name, the value and the valid values."""
    with pytest.raises(ValueError, match=f"{variable}='{text}': {rule}"):
        TaskEnvironment.from_environ({variable: text})


def test_the_handler_is_left_alone_by_reading(tmp_path: Path) -> None:
    """`list_committed` changes neither the folder nor the signal handlers."""
    from mizzen.checkpoint import list_committed

    before = signal.getsignal(signal.SIGTERM)
    assert list_committed(tmp_path) == []
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(signal.SIGTERM) is before
