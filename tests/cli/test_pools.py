"""Commands for pools and instances, with the real API."""

import json
from pathlib import Path
from xml.etree import ElementTree

from activities.capacity.pool_plans import PoolPlanner
from activities.capacity.pool_supply import read_machines
from infra.config.scheduling import CapacitySettings
from infra.db.capacity import InstanceRow
from infra.db.session import transaction
from mizzen_client.cli.app import run
from tests.cli.service import Capture, Service


def test_operators_set_pools(as_operator: Service, capsys: Capture) -> None:
    """`pools set` changes only the given settings, `--any` removes restrictions, and invalid options change nothing."""
    what = ["pools", "set", "north/burst"]
    assert run([*what, "--size", "2", "--kind", "spot", "--zone", "za", "--max-usd-per-h", "5"]) == 0
    out = capsys.readouterr().out
    assert "north/burst" in out
    assert "za; spot; at most $5.00/h" in out
    assert run([*what, "--any", "--machine-type", "small", "--max-size", "5", "--idle", "10m"]) == 0
    assert "2 to 5" in capsys.readouterr().out
    assert run(["pools", "list", "-o", "json"]) == 0
    out = capsys.readouterr().out
    [pool] = json.loads(out[out.index("[") :])
    assert (pool["size"], pool["kinds"], pool["machine_types"], pool["max_usd_per_h"]) == (2, [], ["small"], None)
    assert (pool["max_size"], pool["idle_s"], pool["buffer"]) == (5, 600.0, 0)
    assert run([*what, "--buffer", "2"]) == 0
    assert "2 to 5, 2 idle" in capsys.readouterr().out
    assert run([*what, "--fixed"]) == 0
    assert "idle" not in capsys.readouterr().out
    for wrong, complaint in (
        (what, "nothing to set"),
        ([*what, "--size", "-1"], "--size"),
        ([*what, "--kind", "cheap"], "cheap"),
        ([*what, "--max-size", "1"], "max_size"),
        ([*what, "--buffer", "1"], "buffer"),
        ([*what, "--idle", "soon"], "--idle"),
        (["pools", "set", "burst", "--size", "1"], "REGION/POOL"),
        (["pools", "set", "mars/burst", "--size", "1"], "mars"),
        (["pools", "rm", "north/other"], "north/other"),
    ):
        assert run(wrong) != 0
        assert complaint in capsys.readouterr().err
    assert run([*what, "--fixed"]) == 0
    assert run(["pools", "rm", "north/burst"]) == run(["pools"]) == 0
    assert "north/burst" not in capsys.readouterr().out.partition("removed north/burst")[2]


def test_operators_end_instances(as_operator: Service, capsys: Capture) -> None:
    """Instances are listed with their costs and reasons, and `instances end` accepts several ids."""
    with transaction(as_operator.engine) as session:
        for number in (1, 2):
            session.add(
                InstanceRow(
                    id=f"in-{number}", region="north", pool="burst", cluster="burst-za-spot", provider="sim", zone="za",
                    kind="spot", machine_type="small", gpus=4, gpu_type="a100", cpus_milli=1000, memory_bytes=1,
                    usd_per_h=4.0, phase="ready",
                )
            )  # fmt: skip
    assert run(["instances"]) == run(["instances", "list", "--pool", "burst", "-o", "wide"]) == 0
    out = capsys.readouterr().out
    assert "in-1" in out
    assert "north/burst" in out
    assert run(["instances", "end", "in-1", "in-9"]) == 3
    out, err = capsys.readouterr()
    assert "in-9" in err
    assert run(["instances", "list", "-o", "json"]) == 0
    rows = {row["id"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["in-1"]["ending"]["sentence"].startswith("ended by")
    assert rows["in-2"]["ending"] is None
    assert run(["instances", "list", "--pool", "other"]) == 0


def test_operators_see_the_plan_of_pools(as_operator: Service, capsys: Capture, tmp_path: Path) -> None:
    """Sizes for plans are set; `pools plan --dry-run` shows the newest plan, and writes its picture."""
    what = ["pools", "set", "north/ras"]
    assert (
        run([*what, "--gpus", "a100=2000000", "--gpus", "h100=8", "--failure-buffer", "0.1", "--max-share", "0.5"]) == 0
    )
    assert run([*what, "--gpus", "a100=2000000", "--no-survives-loss"]) == 0
    capsys.readouterr()
    assert run(["pools", "list", "-o", "json"]) == 0
    [pool] = json.loads(capsys.readouterr().out)
    assert (pool["gpus"], pool["failure_buffer"]) == ({"a100": 2000000}, 0.1)
    assert (pool["survives_loss"], pool["max_share"]) == (False, 0.5)
    assert run(["pools", "plan", "north", "--dry-run"]) != 0
    assert "north" in capsys.readouterr().err
    assert PoolPlanner(as_operator.engine, CapacitySettings()).round() == []
    picture = tmp_path / "plan.svg"
    assert run(["pools", "plan", "north", "--dry-run", "--svg", str(picture)]) == 0
    with transaction(as_operator.engine) as session:  # Other tests of this service may have closed its machine.
        there = sum(one.type.units for one in read_machines(session, "north", {"ras"}, 0.0))
    assert f"ras lacks {2_200_000 - there} a100" in capsys.readouterr().out
    assert ElementTree.fromstring(picture.read_text()).tag.endswith("svg")
    for wrong, complaint in (
        ([*what, "--gpus", "a100"], "key=value"),
        ([*what, "--gpus", "a100=many"], "whole number"),
        ([*what, "--failure-buffer", "2"], "--failure-buffer"),
        ([*what, "--max-share", "0"], "--max-share"),
    ):
        assert run(wrong) != 0
        assert complaint in capsys.readouterr().err
    assert run([*what, "--gpus", "a100=0"]) == run(["pools", "rm", "north/ras"]) == 0
