"""Commands for operators with the real API: machines, clusters, tenants, keys, tables and exports."""

import io
import json
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from infra.db import integrity
from infra.db.models import Machine, Region
from infra.db.rounds import note_round
from infra.db.session import transaction
from infra.db.tables import Replica, Table
from mizzen_client.cli.app import run
from tests.cli.service import Capture, Service


def test_operators_see_and_change_machines(as_operator: Service, capsys: Capture) -> None:
    """The list of machines shows cordons and drains with their reasons; both can be undone."""
    assert run(["machines", "cordon", "north/alpha/m1", "--reason", "fan"]) == 0
    assert run(["machines", "list", "--region", "north", "-o", "json"]) == 0
    assert run(["machines", "drain", "north/alpha/m1"]) == 0
    assert run(["machines"]) == run(["machines", "--region", "north"]) == 0
    out = capsys.readouterr().out
    assert '"note": "fan"' in out and "draining" in out and "cordoned_by_operator" in out
    assert run(["machines", "undrain", "north/alpha/m1"]) == run(["machines", "uncordon", "north/alpha/m1"]) == 0
    assert run(["machines", "cordon", "north/alpha/m9", "nonsense"]) == 3
    assert run(["regions"]) == run(["clusters", "--region", "north"]) == 0
    assert "a100 0/8" in capsys.readouterr().out


def test_machines_say_how_tasks_are_separated(as_operator: Service, capsys: Capture) -> None:
    """The list has the mode of each machine, and why it is not a stronger one."""
    with transaction(as_operator.engine) as session:
        machine = session.get_one(Machine, "north/alpha/m1")
        machine.isolation, machine.isolation_why = "user", "no mounts"
    assert run(["machines", "list", "--region", "north"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert [line.split("user: ")[1:] for line in shown if line.startswith("north/alpha/m1 ")] == [["no mounts"]]
    assert all(line.endswith("none") for line in shown[1:] if not line.startswith("north/alpha/m1 "))
    with transaction(as_operator.engine) as session:
        machine = session.get_one(Machine, "north/alpha/m1")
        machine.isolation, machine.isolation_why = "none", None


def test_operators_say_what_clusters_cost(as_operator: Service, capsys: Capture) -> None:
    """`clusters set` changes only the given settings; an invalid price or name is an error that changes nothing."""
    what = ["clusters", "set", "north/alpha"]
    assert run([*what, "--zone", "n-1", "--capacity", "spot", "--price", "a100=1.25", "--price", "cpu=0.04"]) == 0
    assert run([*what, "--zone", "n-2"]) == 0
    out = capsys.readouterr().out
    assert "n-2" in out and "spot" in out and "a100=1.25" in out and "cpu=0.04" in out
    for wrong, complaint in (
        ([*what, "--price", "a100=much"], "US dollars an hour"),
        ([*what, "--price", "a100=-1"], "prices.a100"),
        (what, "nothing to set"),
        (["clusters", "set", "north", "--zone", "z"], "REGION/CLUSTER"),
        ([*what, "--store", "ftp://host/x"], "store_url: bucket URL 'ftp://host/x'"),
        ([*what, "--store", "s3://b", "--no-store"], "--store or --no-store"),
        (["clusters", "set", "north/omega", "--zone", "z"], "north/omega"),
    ):
        assert run(wrong) != 0
        assert complaint in capsys.readouterr().err
    assert run([*what, "--no-prices"]) == run(["clusters", "list", "-o", "json"]) == 0
    out = capsys.readouterr().out
    [alpha] = json.loads(out[out.index("[") :])
    assert (alpha["zone"], alpha["capacity"], alpha["prices"]) == ("n-2", "spot", {})
    assert run(["costs", "--from", "2026-02-01", "--to", "2026-01-01"]) != 0
    assert "from" in capsys.readouterr().err
    assert run(["costs"]) == 0


@pytest.mark.parametrize("name", ["east", "a/b", "a/b/c/d", "a//c", ""])
def test_what_is_no_machine_says_what_one_is(as_operator: Service, capsys: Capture, name: str) -> None:
    """An invalid machine name is an error that has the format of a machine name."""
    assert run(["machines", "cordon", name]) == 3
    err = capsys.readouterr().err
    assert "region/cluster/machine" in err and "openapi" not in err


def test_operators_keep_tenants_keys_and_secrets(
    as_operator: Service, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`tenants set` changes only the given settings; a key is printed once, and a secret's value never."""
    assert run(["tenants", "set", "new"]) == 2
    assert run(["tenants", "set", "new", "--level", "4", "--gpus", "a100=4", "--cpus", "16"]) == 0
    assert run(["tenants", "set", "new", "--gpus", "h100=2", "--cpus", "none"]) == 0
    capsys.readouterr()
    assert run(["tenants", "list", "-o", "json"]) == 0
    [new] = [t for t in json.loads(capsys.readouterr().out) if t["name"] == "new"]
    assert (new["level"], new["quota"]) == (4, {"gpus": {"a100": 4, "h100": 2}, "cpus": None})
    monkeypatch.setattr(sys, "stdin", io.StringIO("s3cret\n"))
    assert run(["tenants", "secrets", "set", "new", "token"]) == 0
    assert run(["tenants", "secrets", "list", "new"]) == 0
    out, err = capsys.readouterr()
    assert "token" in out and "s3cret" not in out + err
    assert run(["tenants", "secrets", "rm", "new", "token"]) == 0
    capsys.readouterr()
    assert run(["keys", "create", "--role", "submitter", "--tenant", "new", "--label", "ci"]) == 0
    key = capsys.readouterr().out.strip()
    assert key.startswith("mzn_")
    assert run(["keys", "list"]) == 0
    out = capsys.readouterr().out
    [row] = [line for line in out.splitlines() if " ci " in line]
    assert key not in out
    assert run(["tenants", "rm", "new"]) == 5
    assert run(["keys", "revoke", row.split()[0]]) == run(["tenants", "rm", "new"]) == 0
    capsys.readouterr()
    assert run(["audit", "-o", "json"]) == 0
    done = [e["action"] for e in json.loads(capsys.readouterr().out) if e["action"] != "request.refused"]
    assert done[:2] == ["tenant.delete", "key.revoke"]


def test_the_key_of_a_machine_shows_what_the_machine_gives(
    as_operator: Service, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator creates the key; with it, the owner sees the own machine and nothing else."""
    assert run(["keys", "create", "--role", "machine"]) == 2
    assert "machine: is required" in capsys.readouterr().err
    assert run(["keys", "create", "--role", "machine", "--machine", "north/alpha/m1", "--label", "owner"]) == 0
    key = capsys.readouterr().out.strip()
    assert run(["keys"]) == 0
    [row] = [line for line in capsys.readouterr().out.splitlines() if " owner " in line]
    assert "north/alpha/m1" in row
    assert run(["machines", "cordon", "north/alpha/m1", "--reason", "fan"]) == 0
    monkeypatch.setenv("MIZZEN_API_KEY", key)
    capsys.readouterr()
    assert run(["machines", "lending", "north/alpha/m1", "-o", "json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["cordon"]["detail"]["note"] == "fan"
    assert not shown["takes_work"]
    assert run(["machines", "lending", "north/alpha/m1"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("north/alpha/m1: ready, takes no new work - cordoned_by_operator")
    assert "GPU hours given" in out
    assert run(["machines", "lending", "south/beta/m1"]) == run(["ls"]) == 4
    monkeypatch.setenv("MIZZEN_API_KEY", as_operator.keys["operator"])
    assert run(["machines", "uncordon", "north/alpha/m1"]) == 0


def test_a_quota_for_an_unknown_gpu_type_is_set_with_a_warning(as_operator: Service, capsys: Capture) -> None:
    """A quota for a GPU type that no machine has is set, with a warning that lists the fleet's types."""
    assert run(["tenants", "set", "typo", "--level", "4", "--gpus", "a1000=4", "--gpus", "a100=1"]) == 0
    err = capsys.readouterr().err
    assert err == "mizzen: no machine has GPUs of type 'a1000'; the fleet has a100\n"
    assert run(["tenants", "set", "typo", "--level", "4", "--gpus", "a1000=0"]) == 0
    assert capsys.readouterr().err == ""


def test_keys_that_expire_warn_before(as_operator: Service, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key with `--expires` is listed with its remaining time, and every command that uses it prints a warning."""
    assert run(["keys", "create", "--role", "viewer", "--label", "brief", "--expires", "2h"]) == 0
    out, err = capsys.readouterr()
    assert "it expires at " in err
    assert run(["keys"]) == 0
    [row] = [line for line in capsys.readouterr().out.splitlines() if " brief " in line]
    assert "in 1h 59m" in row
    monkeypatch.setenv("MIZZEN_API_KEY", out.strip())
    assert run(["ls", "-n", "1"]) == 0
    assert "mizzen: the API key expires in 1h 59m, at " in capsys.readouterr().err
    assert run(["keys", "create", "--role", "viewer", "--expires", "soon"]) == 2


def _damaged(service: Service, table: str) -> None:
    """Marks a replica as damaged, as the verification of the region does."""
    with transaction(service.engine) as session:
        integrity.found_wrong(session, table, "all", "north", f"tables/{table}/a is missing, expected 2048 bytes")


def test_tables_are_added_copied_and_forgotten(as_operator: Service, capsys: Capture) -> None:
    """A table can be added if its home bucket has objects, and can be replicated, verified, dropped and removed."""
    assert run(["tables", "add", "empty", "--home-region", "north"]) == 2
    (as_operator.folder / "tables/words").mkdir(parents=True)
    (as_operator.folder / "tables/words/a").write_bytes(b"x" * 2048)
    assert run(["tables", "add", "words", "--home-region", "north"]) == 0
    assert run(["tables", "replicate", "words", "north"]) == 0
    capsys.readouterr()
    assert run(["tables", "list"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["words", "2.0", "KiB", "north", "north"] in rows
    assert run(["tables", "verify", "nothing"]) == run(["tables", "verify", "words", "--region", "south"]) == 3
    assert run(["tables", "verify", "--no-wait"]) == 0
    assert run(["tables", "verify", "words", "--region", "north", "--no-wait"]) == 0
    _damaged(as_operator, "words")
    capsys.readouterr()
    assert run(["tables", "verify", "words"]) == 1
    shown = capsys.readouterr()
    assert "north (wrong for" in shown.out and "words/a is missing" in shown.out
    assert shown.err == "wrong replicas: words in north\n"
    assert run(["tables", "drop-replica", "words", "north", "--grace", "1h"]) == 5, "the home was dropped"
    assert run(["tables", "drop-replica", "words", "south"]) == 3
    assert run(["tables", "drop-replica", "words", "south", "--grace", "soon"]) == 2
    assert run(["tables", "rm", "words"]) == 2, "without a terminal --yes is required"
    assert run(["tables", "list", "-o", "name"]) == 0 and "words" in capsys.readouterr().out
    assert run(["tables", "rm", "words", "--yes"]) == 0 and run(["tables", "rm", "words", "--yes"]) == 3
    err = capsys.readouterr().err
    assert "mizzen: there is no table 'words'\n" in err and "no such thing" not in err


def test_export_writes_what_the_simulator_starts_from(as_operator: Service, tmp_path: Path, capsys: Capture) -> None:
    """`mizzen export` writes to a file or to stdout, and `mizzen what-if` reads the file."""
    assert run(["export"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert {"machines", "tenants", "workloads", "taken_at"} <= set(shown)
    path = tmp_path / "live.json"
    assert run(["export", str(path)]) == 0
    assert capsys.readouterr().out == ""
    assert json.loads(path.read_text())["tenants"] == shown["tenants"]
    with pytest.raises(SystemExit) as left:
        run(["what-if", str(path), "--json", str(tmp_path / "out.json"), "--until", "1h"])
    assert left.value.code == 0
    assert json.loads((tmp_path / "out.json").read_text())["run"]["fit_nowhere"] is not None


def test_housekeeping_that_fails_is_seen(as_operator: Service, capsys: Capture) -> None:
    """`mizzen loops` shows the error of a loop, and `mizzen tables` a deletion that is overdue or fails."""
    with transaction(as_operator.engine) as session:
        for _ in range(3):
            note_round(session, "deletion of replicas", 3600.0, "read-only file system")
        session.add(Region(name="south", bucket_url=f"file://{as_operator.folder}/south"))
        session.add(Table(name="late", home_region="north"))
        session.flush()
        session.add(Replica(data_table="late", region="north", state="ready"))
        due = datetime.now(UTC) - timedelta(hours=2)
        session.add(Replica(data_table="late", region="south", state="deleting", delete_at=due))
    assert run(["loops"]) == run(["tables"]) == 0
    shown = capsys.readouterr().out
    assert "failing" in shown and "read-only file system" in shown and "not deleted although due at" in shown
    with transaction(as_operator.engine) as session:
        session.get_one(Replica, ("late", "south")).kept_because = "its deletion fails: read-only file system"
    assert run(["tables"]) == 0
    assert "south (kept: its deletion fails: read-only file system)" in capsys.readouterr().out
    with transaction(as_operator.engine) as session:  # Other modules use the same service.
        session.delete(session.get_one(Replica, ("late", "south")))
        session.delete(session.get_one(Region, "south"))
