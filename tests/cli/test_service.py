"""Commands with the real API: their output on stdout and stderr, and their exit codes."""

import io
import json
import stat
import sys
import threading

import pytest
import yaml

from domain.phases import Phase
from infra.db.models import Workload
from infra.db.session import transaction
from mizzen_client.cli import workload_commands
from mizzen_client.cli.app import run
from mizzen_client.contexts import config_path, load_contexts
from tests.cli.service import DONE, FAILED, Capture, Service, Submit, table_rows

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
    """A unique prefix of an id or a name is accepted; an ambiguous prefix exits with 2, an unknown name with 3.

    Commands that read take the newest workload with a name, live or not, and say so.
    """
    one, two = submit(name="solo"), submit(name="pair")
    third = submit(name="pair")
    capsys.readouterr()
    assert run(["show", one[:-1]]) == 0 and run(["show", "solo"]) == 0
    assert capsys.readouterr().err == ""
    as_vision.become(third, Phase.FAILED, 0, FAILED)
    for command in ("show", "why", "logs", "events", "wait"):
        assert run([command, "pair"]) == (command == "wait")
        out, err = capsys.readouterr()
        assert f"several workloads are named 'pair'; this is the newest, {third} (failed)" in err, command
        assert two not in out + err
    capsys.readouterr()
    assert run(["show", "wl-"]) == 2 and "; give an id" in capsys.readouterr().err
    assert run(["retry", "pair", "--failed"]) == 2
    assert capsys.readouterr().err.count("several workloads are named") == 1
    assert run(["ls", "--phase", "run"]) == 2
    assert "query.phase[0]: Input should be 'pending'" in (err := capsys.readouterr().err)
    assert ", or 'held', 'blocked' or 'live'" in err and "[Phase]" not in err
    assert run(["show", "nobody"]) == 3
    assert run(["show", "wl-0000000000000000"]) == 3


def test_a_command_that_changes_workloads_asks_which_one(
    as_vision: Service, submit: Submit, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name of one live workload is enough. If several have it, the command asks; without a terminal it fails."""
    first, second, third = submit(name="twins"), submit(name="twins"), submit(name="twins")
    as_vision.become(third, Phase.FAILED, 0, FAILED)
    for command in (["cancel", "twins"], ["hold", "twins"], ["lower", "twins", "5"]):
        assert run(command) == 2
        err = capsys.readouterr().err
        assert first in err and second in err and third not in err
    monkeypatch.setattr("sys.stdin", _Terminal("n\ny\n"))
    assert run(["cancel", "twins"]) == 130
    assert run(["cancel", "twins", "-o", "name"]) == 0
    out, err = capsys.readouterr()
    assert out == f"{second}\n" and f"Do you mean the newest, {second}?" in err
    as_vision.become(second, Phase.FAILED, 0, FAILED)
    assert run(["cancel", "twins", "-o", "name"]) == 0  # One live workload is left, and ended ones do not count.
    assert capsys.readouterr().out == f"{first}\n"


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


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
        "uplink     at least 9.5 MiB/s, on average 20.0 MiB/s (measured 1m",
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
    monkeypatch.setattr(workload_commands, "_CANCEL_S", 0.0)
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
