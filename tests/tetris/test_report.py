"""The report of a plan: storage and demand over supply of each region, before and after."""

import json

from domain.instance import InstanceRegion, PlacedTable, RecurringJob, TetrisInstance
from tetris.columns import Columns
from tetris.report import Summary, lines, summarise


def test_regions_before_and_after() -> None:
    """Demand follows its table; high-priority demand and demand without supply are shown separately."""
    given = TetrisInstance(
        (InstanceRegion("r", 100.0, {"a": 10.0}), InstanceRegion("s", 50.0, {"a": 40.0, "b": 5.0})),
        (PlacedTable("x", 25.0, "r"), PlacedTable("y", 5.0, "s")),
        (
            RecurringJob("j", "ml", ("x",), 1, gpu_type="a", gpu_hours=20.0),
            RecurringJob("k", "ml", ("x",), 3, gpu_type="a", gpu_hours=4.0),
            RecurringJob("l", "ml", ("x",), 3, gpu_type="b", gpu_hours=1.0),
        ),
    )
    columns = Columns.of(given)
    summary = summarise(columns, columns.homes_of({"x": "s"}))
    before, after = summary.regions_before, summary.regions_after
    assert (before[0].stored_bytes, after[0].stored_bytes) == (25.0, 0.0)
    assert before[0].demand_h == {"a": 24.0, "b": 1.0}
    assert after[1].high_demand_h == {"a": 20.0}
    told = [line.split("  ") for line in lines(summary) if line]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in told]
    assert [row[0] for row in cells[:5]] == ["BEFORE", "read", "gpu", "storage", "total"]
    assert cells[5:-1] == [
        ["REGION", "stored/capacity", "a high/supply", "a all/supply", "b high/supply", "b all/supply"],
        ["r", "0.25 -> 0.00", "2.00 -> 0.00", "2.40 -> 0.00", "-", "1 -> 0 h of 0"],
        ["s", "0.10 -> 0.60", "0.00 -> 0.50", "0.00 -> 0.60", "0.00 -> 0.00", "0.00 -> 0.20"],
    ]
    assert cells[-1] == ["1 of 2 tables move, 25 bytes are copied"]
    assert Summary.of(json.loads(json.dumps(summary.document()))) == summary


def test_parts_of_next_to_nothing() -> None:
    """A ratio to a very small supply is shown as a power of ten, so that columns stay narrow."""
    given = TetrisInstance(
        (InstanceRegion("r", 100.0, {"a": 1e-9}), InstanceRegion("s", 0.0, {"a": 1.0})),
        (PlacedTable("x", 25.0, "r"),),
        (RecurringJob("j", "ml", ("x",), 1, gpu_type="a", gpu_hours=20.0),),
    )
    columns = Columns.of(given)
    told = "\n".join(lines(summarise(columns, columns.homes_of({"x": "s"}))))
    assert "2e+10 -> 0.00" in told and "0 -> 25 bytes of 0" in told
