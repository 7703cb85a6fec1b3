"""Commands with the real API: their output on stdout and stderr, and their exit codes."""

import io
import json
import stat
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import yaml
from sqlalchemy import func, select

from domain.phases import Phase
from infra.config import LimitSettings
from infra.db.models import Workload
from infra.db.session import transaction
from infra.db.tables import Replica, Table
from infra.db.tenants import Archive
from mizzen.cli import acting
from mizzen.cli.app import run
from mizzen.client.contexts import config_path, load_contexts
from tests.cli.service import DOCUMENT, DONE, FAILED, Capture, Service, Submit, serving, table_rows

# -------------------------------------------------------------------------------------------------------- submitting


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
    assert f"{files[1]}: jobs[0].tasks: must be an integer from 1 to 100000, it is a string (got 'many')\n" in err
    assert f"{files[2]}: tables[0]: unknown table; did you mean digits? (got 'digts')\n" in err
    assert len(err.splitlines()) == 3
    assert run(["ls", "--name", "alone", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_a_working_directory_is_uploaded_once(
    as_operator: Service, write: Callable[..., str], tmp_path: Path, capsys: Capture
) -> None:
    """`workdir` is relative to the document's folder; unchanged files are not uploaded again."""
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
    monkeypatch.setattr("mizzen.client.Client.dry_run", lambda *_, **__: dry_run())
    assert run(["submit", "--dry-run", write(jobs=[job])]) == 7
    assert "no region can hold it" in capsys.readouterr().err


def test_a_dry_run_needs_the_scheduler(as_vision: Service, write: Callable[..., str], capsys: Capture) -> None:
    """Without a scheduler, a dry run exits with 6 for a valid document and with 2 for an invalid one."""
    assert run(["submit", "--dry-run", "--patience", "0", write()]) == 6
    assert run(["submit", "--dry-run", "--patience", "0", write(jobs=[])]) == 2
    assert capsys.readouterr().out == ""


# ------------------------------------------------------------------------------------------------- waiting and showing


def test_wait_succeeds_only_if_all_did(as_vision: Service, submit: Submit, capsys: Capture) -> None:
    """`wait` exits with 0 if all workloads succeeded and with 1 if one failed; phases are printed on stderr."""
    good, bad = submit(), submit()
    as_vision.place(good)
    as_vision.become(good, Phase.SUCCEEDED, reason=DONE)
    as_vision.become(bad, Phase.FAILED, 0, FAILED)
    assert run(["wait", good]) == 0
    out, err = capsys.readouterr()
    assert table_rows(out)[0]["PHASE"] == "succeeded" and f"{good} digits has succeeded" in err
    assert run(["wait", good, bad, "-o", "json"]) == 1
    assert [w["phase"] for w in json.loads(capsys.readouterr().out)] == ["succeeded", "failed"]


def test_a_workload_is_found_by_the_start_of_its_id_or_its_name(
    as_vision: Service, submit: Submit, capsys: Capture
) -> None:
    """A unique prefix of an id or a live workload's name is accepted; ambiguous ones exit with 2, unknown with 3."""
    one, two = submit(name="solo"), submit(name="pair")
    third = submit(name="pair")
    assert run(["show", one[:-1]]) == 0 and run(["show", "solo"]) == 0
    assert run(["show", "pair"]) == 2
    err = capsys.readouterr().err
    assert two in err and third in err
    as_vision.become(two, Phase.FAILED, 0, FAILED)
    assert run(["show", "pair", "-o", "name"]) == 0
    assert capsys.readouterr().out == f"{third}\n"
    assert run(["show", "wl-"]) == 2
    assert run(["show", "nobody"]) == 3
    assert run(["show", "wl-0000000000000000"]) == 3


def test_show_is_a_readable_page(as_vision: Service, submit: Submit, capsys: Capture) -> None:
    """`show` prints phase, reason, region, jobs, progress with the checkpoint's age, and the outcome of attempts."""
    id_ = submit(name="page")
    as_vision.place(id_)
    as_vision.become(id_, Phase.PENDING, reason=FAILED)
    as_vision.place(id_, 2)
    capsys.readouterr()
    assert run(["show", id_]) == 0
    out = capsys.readouterr().out
    for words in (
        f"{id_}  page  (tenant vision)",
        "region     north",
        "step 120; checkpoint of step 100 (",
        "ago, 51.1 KiB)",
        "saves      every 804.98 s (W): a save costs 30 s (C), an interruption comes every 3h (mu, by hazard)",
        "lost work  0s if it were interrupted now, 1m so far",
        "load       loaded, 1 checkpoint skipped as damaged",
        "train: 2 tasks with a100:1, 1 cpu, 1.0 GiB",
        "task_failed: task train/0 ended with exit code 3",
        "active",
    ):
        assert words in out


def test_why_is_a_summary_and_a_line_for_each_reason(as_vision: Service, submit: Submit, capsys: Capture) -> None:
    """`why` prints a summary and a line for each reason; `-o name` prints the codes."""
    id_ = submit()
    assert run(["hold", id_]) == 0
    capsys.readouterr()
    assert run(["why", id_]) == 0
    summary, reason = capsys.readouterr().out.splitlines()
    assert summary.startswith("pending: held by ") and reason.startswith("  held: held by ")
    assert run(["why", id_, "-o", "name"]) == 0
    assert capsys.readouterr().out == "held\n"


def test_lists_are_filtered_and_cut(as_vision: Service, submit: Submit, capsys: Capture) -> None:
    """`ls` filters by label, name, phase and liveness, and prints a note if the list was cut."""
    ids = [submit(name=f"many-{n}", labels={"of": "many", "n": str(n)}) for n in range(3)]
    as_vision.become(ids[0], Phase.SUCCEEDED, 0, DONE)

    def listed(*options: str) -> list[str]:
        assert run(["ls", "-o", "name", "--label", "of=many", *options]) == 0
        return capsys.readouterr().out.split()

    assert listed() == ids[::-1]
    assert listed("--label", "n=1") == [ids[1]] == listed("--name", "many-1")
    assert listed("--live") == ids[:0:-1]
    assert listed("--phase", "succeeded", "--phase", "failed") == [ids[0]]
    assert listed("--phase", "live", "--phase", "succeeded") == ids[::-1]
    assert listed("--limit", "0") == ids[::-1]
    assert run(["ls", "--phase", "runing"]) == 2
    assert "runing" in (err := capsys.readouterr().err) and "'running'" in err
    assert run(["ls", "--label", "of=many", "-n", "2", "-o", "name"]) == 0
    out, err = capsys.readouterr()
    assert out.split() == ids[:0:-1] and "more than 2" in err
    assert run(["ls", "--label", "of=nothing"]) == 0
    assert capsys.readouterr().out == ""


def test_logs_are_printed_as_they_are(as_vision: Service, submit: Submit, capsys: Capture) -> None:
    """Log lines are printed unchanged, also with unusual line separators; --tail, --job and --task select lines."""
    id_ = submit()
    as_vision.place(id_)
    as_vision.write_log(id_, "one\rtwo\u2028three\nlast\n", end=True)
    as_vision.write_log(id_, "b\n", task=1, end=True)
    assert run(["logs", id_, "--task", "0"]) == 0
    assert capsys.readouterr().out == "one\rtwo\u2028three\nlast\n"
    assert run(["logs", id_, "--tail", "1"]) == 0
    assert capsys.readouterr().out == "train/0| last\ntrain/1| b\n"
    assert run(["logs", id_, "--job", "train", "--task", "1", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"line": "b"}
    assert run(["logs", id_, "--job", "nope"]) == 2
    assert run(["logs", id_, "--attempt", "7"]) == 3


def test_events_of_a_workload_can_be_taken_up_again(as_vision: Service, submit: Submit, capsys: Capture) -> None:
    """`events` prints one JSON object a line, in order; `--after` resumes after an event."""
    id_ = submit()
    as_vision.place(id_)
    as_vision.become(id_, Phase.SUCCEEDED, reason=DONE)
    assert run(["events", id_, "-o", "json"]) == 0
    first, *rest = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [e["kind"] for e in (first, *rest)] == ["workload.pending", "workload.running", "workload.succeeded"]
    assert run(["events", "-f", id_, "--after", first["id"], "-o", "name"]) == 0
    assert capsys.readouterr().out.split() == [e["id"] for e in rest]
    assert run(["events", id_]) == 0
    assert "completed: all 2 tasks ended with exit code 0" in capsys.readouterr().out
    assert run(["events", id_, "--after", "nonsense"]) == 2


# ------------------------------------------------------------------------------------------------------------- acting


def test_workloads_are_changed_each_for_itself(as_vision: Service, submit: Submit, capsys: Capture) -> None:
    """If a workload cannot be changed, the others are still changed; the exit code is that of the first error."""
    one, two = submit(), submit()
    as_vision.become(one, Phase.SUCCEEDED, 0, DONE)
    capsys.readouterr()
    assert run(["hold", one, two, "-o", "name"]) == 5
    out, err = capsys.readouterr()
    assert out == f"{two}\n" and one in err and "has already ended with phase succeeded" in err
    assert run(["release", two, "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["held_by"] is None
    assert run(["lower", two, "6", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["level"] == 6
    assert run(["lower", two, "5"]) == 2
    assert run(["preempt", two]) == 4


def test_logs_of_what_waits_say_so(as_vision: Service, submit: Submit, capsys: Capture) -> None:
    """`logs` of a pending workload prints nothing on stdout, and its phase and reason on stderr."""
    id_ = submit()
    assert run(["logs", id_]) == 0
    assert capsys.readouterr() == ("", f"mizzen: {id_} is pending: waits for the next scan of the queue\n")


def test_cancel_prints_what_the_workload_is_then(
    as_vision: Service, submit: Submit, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`cancel` waits briefly: it prints `cancelled`, or a note that the workload has not ended yet."""
    assert run(["cancel", submit()]) == 0
    assert table_rows(capsys.readouterr().out)[0]["PHASE"] == "cancelled", "a queued workload must end at once"
    id_ = submit()
    as_vision.place(id_)
    ends = threading.Timer(0.5, as_vision.become, (id_, Phase.CANCELLED, 0))
    ends.start()
    assert run(["cancel", id_]) == 0
    ends.join()
    assert table_rows(capsys.readouterr().out)[0]["PHASE"] == "cancelled"
    monkeypatch.setattr(acting, "_CANCEL_S", 0.0)
    id_ = submit()
    as_vision.place(id_)
    assert run(["cancel", id_]) == 0
    assert "it ends when its tasks have saved and stopped" in capsys.readouterr().err


def test_cancel_takes_ids_or_labels(as_vision: Service, submit: Submit, capsys: Capture) -> None:
    """`cancel --label` cancels and prints all live workloads with the labels; ids cannot be combined with labels."""
    one, two, other = submit(labels={"c": "1"}), submit(labels={"c": "1", "d": "2"}), submit(labels={"c": "1"})
    assert run(["cancel", "--label", "c=1", "--label", "d=2", "-o", "name"]) == 0
    assert capsys.readouterr().out == f"{two}\n"
    assert run(["cancel", one, "-o", "name"]) == 0
    assert capsys.readouterr().out == f"{one}\n"
    assert run(["cancel", other, "--label", "c=1"]) == 2
    with transaction(as_vision.engine) as session:
        phases = [session.get_one(Workload, id_).phase for id_ in (one, two, other)]
    assert phases == ["cancelled", "cancelled", "pending"]


def test_another_tenants_workload_is_not_there(
    as_vision: Service, submit: Submit, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    """With another tenant's key the workload is not found (exit code 3); with an unknown key the exit code is 4."""
    id_ = submit()
    monkeypatch.setenv("MIZZEN_API_KEY", as_vision.keys["speech"])
    assert run(["cancel", id_]) == 3
    monkeypatch.setenv("MIZZEN_API_KEY", "mzn_wrong")
    assert run(["ls"]) == 4
    assert capsys.readouterr().out == ""


def test_the_queue_shows_what_waits(as_vision: Service, submit: Submit, capsys: Capture) -> None:
    """`queue` lists each waiting workload with its reason code."""
    id_ = submit()
    assert run(["queue"]) == 0
    out = capsys.readouterr().out
    assert any(line.startswith("   -") and id_ in line and "scan_pending" in line for line in out.splitlines())
    assert run(["queue", "-n", "1", "-o", "name"]) == 0
    assert capsys.readouterr().out.count("\n") == 1


# ------------------------------------------------------------------------------------------------- logins and formats


def test_login_checks_the_key_and_saves_it(service: Service, monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """`login` saves a valid key in a private file and later commands use it; an unknown key is not saved."""
    monkeypatch.setattr(sys, "stdin", io.StringIO("mzn_wrong"))
    assert run(["login", service.url, "--key", "-"]) == 4
    assert not config_path().exists()
    monkeypatch.setattr(sys, "stdin", io.StringIO(service.keys["vision"] + "\n"))
    assert run(["login", service.url, "--key", "-", "--context", "lab"]) == 0
    out, err = capsys.readouterr()
    assert "submitter of tenant vision" in out and service.keys["vision"] not in out + err
    assert load_contexts().current == "lab"
    assert stat.S_IMODE(config_path().stat().st_mode) == 0o600
    assert run(["ls", "-n", "1"]) == 0
    assert run(["ls", "--context", "nope"]) == 2


def test_every_reading_command_prints_every_format(as_operator: Service, submit: Submit, capsys: Capture) -> None:
    """With `-o json` or `-o yaml` the whole stdout is one value."""
    id_ = submit()
    capsys.readouterr()
    for command in (
        ["ls"], ["show", id_], ["why", id_], ["queue"], ["regions"], ["clusters"], ["machines", "list"], ["audit"],
        ["tables", "list"], ["tenants", "list"], ["keys", "list"], ["contexts", "list"], ["version"],
        ["tenants", "secrets", "list", "vision"], ["completion", "bash"], ["hold", id_], ["release", id_],
    ):  # fmt: skip
        for form in ("json", "yaml", "wide", "name", "table"):
            assert run([*command, "-o", form]) == 0, command
            out = capsys.readouterr().out
            if form in ("json", "yaml"):
                value = json.loads(out) if form == "json" else yaml.safe_load(out)
                assert isinstance(value, list | dict), command


def test_an_api_that_is_not_there_is_6(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """If the API does not respond the exit code is 6; if its address is invalid the exit code is 2."""
    monkeypatch.setenv("MIZZEN_API", "http://127.0.0.1:9")
    assert run(["ls", "--patience", "0"]) == 6
    assert "no response from http://127.0.0.1:9" in capsys.readouterr().err
    monkeypatch.setenv("MIZZEN_API", "ftp://x")
    assert run(["ls"]) == 2


def test_held_workloads_are_listed(as_vision: Service, submit: Submit, capsys: Capture) -> None:
    """`ls --phase held` lists held workloads, and can be combined with other phases."""
    held, other = submit(name="held-one"), submit(name="other-one")
    assert run(["hold", held]) == 0
    capsys.readouterr()
    assert run(["ls", "--phase", "held", "-o", "name"]) == 0
    found = capsys.readouterr().out.split()
    assert held in found and other not in found
    assert run(["ls", "--phase", "held", "--phase", "pending", "-o", "name"]) == 0
    assert {held, other} <= set(capsys.readouterr().out.split())


def test_the_version_is_an_option_too(capsys: Capture) -> None:
    """`mizzen --version` prints the same line as `mizzen version`."""
    assert run(["--version"]) == run(["version"]) == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first == second and first.startswith("mizzen ")


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
