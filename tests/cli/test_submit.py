"""`mizzen submit` with the real API: its output on stdout and stderr, and its exit codes."""

import io
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import yaml
from sqlalchemy import func, select

from infra.config.services import LimitSettings
from infra.db.session import transaction
from infra.db.tables import Replica, Table
from infra.db.tenants import Archive
from mizzen_client.cli.app import run
from tests.cli.service import DOCUMENT, Capture, Service, Submit, serving


def test_submit_prints_the_id_and_nothing_else(as_vision: Service, submit: Submit, capsys: Capture) -> None:
    """`submit` prints only the id on stdout, in the form that other commands accept."""
    id_ = submit()
    assert run(["show", id_, "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)["id"] == id_


def test_options_of_submit_win_over_the_document(
    as_vision: Service, write: Callable[..., str], capsys: Capture
) -> None:
    """--name replaces the document's name and --label adds to its labels."""
    file = write()
    assert run(["submit", file, "--name", "other", "--label", "a=b=c", "-o", "json"]) == 0
    [workload] = json.loads(capsys.readouterr().out)
    assert (workload["name"], workload["labels"]) == ("other", {"sweep": "1", "a": "b=c"})
    assert run(["submit", file, "--tenant", "speech"]) == 2
    assert "tenant: this API key may only submit for tenant vision" in capsys.readouterr().err


def test_documents_come_from_stdin_too(as_vision: Service, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """`-` reads documents in YAML or JSON from stdin; errors have the file name `stdin`."""
    two = f"{json.dumps({**DOCUMENT, 'name': 'one'})}\n---\n{yaml.safe_dump({**DOCUMENT, 'name': 'two'})}"
    monkeypatch.setattr(sys, "stdin", io.StringIO(two))
    assert run(["submit", "-", "-o", "json"]) == 0
    assert [w["name"] for w in json.loads(capsys.readouterr().out)] == ["one", "two"]
    monkeypatch.setattr(sys, "stdin", io.StringIO("nmae: x\n"))
    assert run(["submit", "-"]) == 2
    assert "stdin: nmae: unknown key; did you mean name? (got 'nmae')" in capsys.readouterr().err


def test_everything_wrong_with_all_documents_is_told_and_nothing_submitted(
    as_vision: Service, write: Callable[..., str], capsys: Capture
) -> None:
    """Each problem is one line with file, path and message; if any document is invalid, none is submitted."""
    job = {**DOCUMENT["jobs"][0], "taks": 3, "tasks": "many"}
    files = [write("good.yaml", name="alone"), write("bad.yaml", jobs=[job]), write("odd.yaml", tables=["digts"])]
    with transaction(as_vision.engine) as session:
        session.add(Table(name="digits", home_region="north"))
        session.flush()
        session.add(Replica(data_table="digits", region="north", state="ready"))
    assert run(["submit", *files]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"{files[1]}: jobs[0].taks: unknown key; did you mean tasks? (got 'taks')\n" in err
    right = "an integer from 1 to 100000, or the fewest and the most tasks as in {min: 2, max: 16}"
    assert f"{files[1]}: jobs[0].tasks: must be {right}, it is a string (got 'many')\n" in err
    assert f"{files[2]}: tables[0]: unknown table; did you mean digits? (got 'digts')\n" in err
    assert len(err.splitlines()) == 3
    assert run(["ls", "--name", "alone", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_a_working_directory_is_uploaded_once(
    as_operator: Service, write: Callable[..., str], tmp_path: Path, capsys: Capture
) -> None:
    """`workdir` is relative to the document's folder, that of --set to the current one. Unchanged files are not
    uploaded again.
    """
    (tmp_path / "src").mkdir()
    (tmp_path / "src/train.py").write_text("print('hello')")
    file = write(workdir="./src")

    def archives() -> int:
        with transaction(as_operator.engine) as session:
            return session.scalar(select(func.count()).select_from(Archive)) or 0

    before = archives()
    assert run(["submit", file, file, "-o", "json"]) == 0
    one, two = json.loads(capsys.readouterr().out)
    assert one["spec"]["workdir"] == two["spec"]["workdir"] and archives() == before + 1
    (tmp_path / "src/train.py").write_text("print('other')")
    assert run(["submit", write(workdir="./src", name="Not A Name")]) == 2
    assert archives() == before + 1
    assert "name: must be a name" in capsys.readouterr().err
    assert run(["submit", write(workdir="./src", tables=["nowhere"])]) == 2
    said = capsys.readouterr().err
    assert "nowhere" in said and "archive" not in said and "checksum" not in said
    (tmp_path / "other").mkdir()
    (tmp_path / "other/train.py").write_text("print('another')")
    file = write(workdir="./src")
    assert run(["submit", file, "--set", f"workdir={tmp_path / 'other'}", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["spec"]["workdir"] != one["spec"]["workdir"]
    assert run(["submit", "--from", one["id"], "--set", "workdir=null", "-o", "json"]) == 0
    assert "workdir" not in json.loads(capsys.readouterr().out)[0]["spec"]
    assert run(["submit", file, "--set", "workdir=./nowhere"]) == 2
    assert "workdir: nowhere is not a folder" in capsys.readouterr().err


def test_the_same_idempotency_key_is_the_same_workload(
    as_vision: Service, write: Callable[..., str], capsys: Capture
) -> None:
    """Two submissions with one idempotency key create one workload; a different document with that key is an error."""
    file = write()
    assert run(["submit", file, "--idempotency-key", "k1"]) == run(["submit", file, "--idempotency-key", "k1"]) == 0
    one, two = capsys.readouterr().out.split()
    assert one == two
    assert run(["submit", file, "--idempotency-key", "k1", "--name", "other"]) == 2


def test_a_gang_that_never_fits_is_named_at_submission(
    as_vision: Service, write: Callable[..., str], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If no region can hold a gang, `submit` prints a warning with figures, and a dry run exits with 7."""
    job = {**DOCUMENT["jobs"][0], "tasks": 1000}
    assert run(["submit", write(jobs=[job])]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("wl-") and len(out.splitlines()) == len(err.splitlines()) == 1
    assert "no region can hold job train with 1000 tasks" in err
    answer = {"admitted": False, "rank": 3, "over_quota": False, "region": None, "machines": [], "victims": []}
    dry_run = partial(dict, answer | {"reasons": [], "never": "no region can hold it"})
    monkeypatch.setattr("mizzen_client.Client.dry_run", lambda *_, **__: dry_run())
    assert run(["submit", "--dry-run", write(jobs=[job])]) == 7
    assert "no region can hold it" in capsys.readouterr().err


def test_a_dry_run_needs_the_scheduler(as_vision: Service, write: Callable[..., str], capsys: Capture) -> None:
    """Without a scheduler, a dry run exits with 6 for a valid document and with 2 for an invalid one."""
    assert run(["submit", "--dry-run", "--patience", "0", write()]) == 6
    assert run(["submit", "--dry-run", "--patience", "0", write(jobs=[])]) == 2
    assert capsys.readouterr().out == ""


def test_a_document_that_is_not_text(as_vision: Service, tmp_path: Path, capsys: Capture) -> None:
    """A binary file is an error with the position of the first invalid byte."""
    file = tmp_path / "binary.yaml"
    file.write_bytes(b"version: 1\xff\xfe")
    assert run(["submit", str(file)]) == 2
    err = capsys.readouterr().err
    assert err.startswith(f"{file}: is not text: byte 0xff at position 10") and "codec" not in err


def test_a_sweep_gets_through_limits_by_itself(
    service: Service, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep that exceeds the request rate is submitted completely, because 429 responses are retried."""
    slow = service.settings.model_copy(update={"limits": LimitSettings(requests_per_key=5, burst_s=1)})
    file = tmp_path / "sweep.yaml"
    file.write_text("---\n".join(yaml.safe_dump({**DOCUMENT, "name": f"sweep-{n}"}) for n in range(6)))
    with serving(slow) as port:
        monkeypatch.setenv("MIZZEN_API", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("MIZZEN_API_KEY", service.keys["vision"])
        assert run(["submit", str(file)]) == 0
    assert len(capsys.readouterr().out.split()) == 6


def test_options_change_fields_of_the_document(
    as_vision: Service, write: Callable[..., str], capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """--set takes paths and values in YAML, --env adds to all jobs, and --tasks changes the only job."""
    monkeypatch.setenv("FROM_HERE", "yes")
    changes = ("--set", "jobs.0.run=[echo, hi]", "--set", "limits.retries=3", "--set", "checkpoint.interval=90s")
    options = ("--env", "LR=1", "--env", "FROM_HERE", "--tasks", "5")
    assert run(["submit", write(), *changes, *options, "-o", "json"]) == 0
    [workload] = json.loads(capsys.readouterr().out)
    job = workload["spec"]["jobs"][0]
    assert (job["run"], job["env"], job["tasks"]) == (["echo", "hi"], {"LR": "1", "FROM_HERE": "yes"}, 5)
    assert workload["spec"]["limits"] == {"retries": 3} and workload["spec"]["checkpoint"] == {"interval": 90.0}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--set", "jobs.1.run=x"], "--set jobs.1.run: jobs is a list of 1; '1' must be an index from 0"),
        (["--set", "name.first=x"], "--set name.first: name is 'digits', which has no field 'first'"),
        (["--set", "jobs"], "'jobs' is not of the form PATH=VALUE"),
        (["--set", "jobs=[1"], "'jobs=[1':1:3: expected"),
        (["--set", "jbos=[]"], "jbos: unknown key; did you mean jobs?"),
        (
            ["--env", "NOT_SET_HERE"],
            "'NOT_SET_HERE' is not NAME=VALUE, and no variable of this name is set in this shell",
        ),
        (["--env", "1=x"], "a variable's name must have letters"),
        (["--tasks", "0"], "'0': must be at least 1 task, not 0"),
        (["--tasks", "0:3"], "'0:3': must be at least 1 task, not 0"),
        (["--tasks", "-2"], "'-2' must be a number, such as 4, or the fewest and the most, such as 2:16"),
        (["--tasks", "16:2"], "'16:2': the most tasks, 2, must be at least the fewest, 16"),
        (["--tasks", "2:"], "'2:' must be a number, such as 4, or the fewest and the most, such as 2:16"),
        (["--tasks", "2:4:8"], "'2:4:8' must be a number"),
        (["--tasks", "two"], "'two' must be a number"),
        (["--tasks", "²"], "'²' must be a number"),
        (["--tasks", "2:100000000"], "jobs[0].tasks.max: must be an integer from 1 to"),
        (["--from", "wl-x"], "give either FILES or --from WORKLOAD"),
    ],
)
def test_wrong_changes_are_told(
    as_vision: Service, write: Callable[..., str], capsys: Capture, options: list[str], message: str
) -> None:
    """Nothing is submitted, and the message names the option or the field."""
    assert run(["submit", write(), *options]) == 2
    assert message in capsys.readouterr().err


def test_a_range_of_tasks_makes_the_job_elastic(as_vision: Service, write: Callable[..., str], capsys: Capture) -> None:
    """`--tasks 2:16` of `submit` and `run` is `tasks: {min: 2, max: 16}`; with several jobs, the message has that form.

    3:3 is the number 3. `--interactive` accepts no range.
    """
    elastic = {"min": 2, "max": 16}
    for given, tasks in (("2:16", elastic), ("3:3", 3)):
        for command in (["submit", write()], ["run", "--no-files", "-d"]):
            after = ["--", "true"] if command[0] == "run" else []
            assert run([*command, "--tasks", given, "-o", "json", *after]) == 0
            [workload] = json.loads(capsys.readouterr().out)
            assert workload["spec"]["jobs"][0]["tasks"] == tasks
    jobs = [{"name": name, "tasks": 1, "run": "true"} for name in ("a", "b")]
    assert run(["submit", write(jobs=jobs), "--tasks", "2:16"]) == 2
    assert "use --set 'jobs.NUMBER.tasks={min: 2, max: 16}'" in capsys.readouterr().err
    assert run(["run", "-i", "--no-files", "--tasks", "1:2", "true"]) == 2
    assert "--interactive: is for one task" in capsys.readouterr().err


def test_the_document_of_a_workload_can_be_submitted(as_vision: Service, submit: Submit, capsys: Capture) -> None:
    """`show` prints it, `submit --from` takes it with changes, and `retry` takes several."""
    first = submit(tables=[], limits={"retries": 2}, files={"a": "b"})
    assert run(["show", first, "-o", "json"]) == 0
    spec = json.loads(capsys.readouterr().out)["spec"]
    assert run(["submit", "--from", first, "--name", "again", "-o", "json"]) == 0
    [again] = json.loads(capsys.readouterr().out)
    assert again["spec"] == {**spec, "name": "again"} and again["id"] != first
    assert run(["retry", first, again["id"]]) == 0
    ids = capsys.readouterr().out.split()
    assert len(ids) == 2 and not {first, again["id"]} & set(ids)
    assert run(["retry", "wl-none"]) == 3


def test_run_submits_what_its_options_say(as_vision: Service, capsys: Capture, tmp_path: Path) -> None:
    """Without a document, and without a file of this folder if asked."""
    options = [
        "--gpus",
        "a100:2",
        "--cpus",
        "4",
        "--memory",
        "8GiB",
        "--tasks",
        "3",
        "--retries",
        "1",
    ]
    more = ["--label", "a=b", "--max-runtime", "2h", "--no-files", "-d", "-o", "json"]
    assert run(["run", *options, *more, "--", "./Train_it.py", "--lr", "1"]) == 0
    [workload] = json.loads(capsys.readouterr().out)
    assert workload["spec"] == {
        "version": 1, "name": "train-it-py", "tenant": "vision", "labels": {"a": "b"},
        "limits": {"max_runtime": 7200.0, "retries": 1},
        "jobs": [{
            "name": "main", "role": "main", "tasks": 3, "run": ["./Train_it.py", "--lr", "1"],
            "resources": {"accelerators": ["a100:2"], "cpus": 4.0, "memory": 8 << 30},
        }],
    }  # fmt: skip
    assert run(["run", "--secret", "X", "--no-files", "true"]) == 2
    assert "--secret: 'X' is not of the form NAME=SECRET" in capsys.readouterr().err
    assert run(["run"]) == 2


def test_run_names_the_options_in_errors(as_operator: Service, capsys: Capture) -> None:
    """Not the fields of a document, which the user has not written."""
    assert run(["run", "--no-files", "true"]) == 2
    assert capsys.readouterr().err == "--tenant: missing: only a key with a tenant can omit it\n"
    wrong = ["--memory", "much", "--env", "A B=1", "--max-runtime", "x", "--capacity", "x", "--label", "a b=c"]
    assert run(["run", "--no-files", "--tenant", "vision", *wrong, "--gpus", "x:0", "true"]) == 2
    named = {line.partition(":")[0] for line in capsys.readouterr().err.splitlines()}
    assert named == {"--memory", "--env 'A B'", "--max-runtime", "--capacity", "--label 'a b'", "--gpus"}


def test_workloads_wait_for_others(
    as_vision: Service, submit: Submit, capsys: Capture, write: Callable[..., str]
) -> None:
    """--after and --not-before add to the document; `ls`, `why` and `show` say what a workload waits for."""
    first = submit(name="prepare")
    file = write(name="train", after=["prepare"])
    assert run(["submit", file, "--after", "prepare:started", "--not-before", "2h"]) == 0
    id_ = capsys.readouterr().out.strip()
    assert run(["ls", "--phase", "blocked", "--name", "train"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split()[:4] == [id_, "train", "vision", "blocked"]
    assert run(["why", id_, "-o", "name"]) == 0
    assert capsys.readouterr().out.split() == ["dependency", "dependency", "not_before"]
    assert run(["show", id_]) == 0
    shown = capsys.readouterr().out
    assert f"  prepare ({first}, pending) has started: waiting\n" in shown and shown.count(": waiting\n") == 3
    options = ["--after", "prepare:ended", "--not-before", "2999-01-01T00:00Z", "--no-files", "-d", "-o", "json"]
    assert run(["run", *options, "--", "true"]) == 0
    [made] = json.loads(capsys.readouterr().out)
    assert [(one["condition"], one["not_before"]) for one in made["after"]] == [
        ("ended", None), ("due", "2999-01-01T00:00:00Z"),
    ]  # fmt: skip
    assert run(["submit", file, "--after", "nothing"]) == 2
    assert "after[1]: tenant vision has no workload with the name or id nothing" in capsys.readouterr().err
    assert run(["submit", file, "--not-before", "tomorrow"]) == 2
    assert "a time before the year 3000 with its zone, such as 2026-11-28T08:00:00+01:00" in capsys.readouterr().err
