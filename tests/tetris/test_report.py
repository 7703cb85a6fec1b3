"""What an operator sees of a plan: storage and demand over supply of each region, before and after."""

from domain.instance import Instance, Job, Region, Table
from tetris.columns import Columns
from tetris.report import lines, report


def test_regions_before_and_after() -> None:
    """Demand goes where its table goes; high priority is told apart; demand without supply is told as such."""
    given = Instance(
        (Region("r", 100.0, {"a": 10.0}), Region("s", 50.0, {"a": 40.0, "b": 5.0})),
        (Table("x", 25.0, "r"), Table("y", 5.0, "s")),
        (
            Job("j", "ml", ("x",), 1, gpu_type="a", gpu_hours=20.0),
            Job("k", "ml", ("x",), 3, gpu_type="a", gpu_hours=4.0),
            Job("l", "ml", ("x",), 3, gpu_type="b", gpu_hours=1.0),
        ),
    )
    columns = Columns.of(given)
    before, after = (report(columns, columns.homes_of(homes)) for homes in ({}, {"x": "s"}))
    assert (before[0].stored_bytes, after[0].stored_bytes) == (25.0, 0.0)
    assert before[0].demand_h == {"a": 24.0, "b": 1.0}
    assert after[1].high_demand_h == {"a": 20.0}
    told = [line.split("  ") for line in lines(before, after)]
    cells = [[cell.strip() for cell in line if cell.strip()] for line in told]
    assert cells == [
        ["REGION", "STORAGE", "a HIGH", "a ALL", "b HIGH", "b ALL"],
        ["r", "0.25 > 0.00", "2.00 > 0.00", "2.40 > 0.00", "-", "none there > 0"],
        ["s", "0.10 > 0.60", "0.00 > 0.50", "0.00 > 0.60", "0.00 > 0.00", "0.00 > 0.20"],
    ]
