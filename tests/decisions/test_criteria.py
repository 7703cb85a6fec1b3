"""The criteria that compare plans: their order and their documentation."""

from dataclasses import fields
from pathlib import Path

from domain.criteria import PlanQuality

ORDER = (
    "victims_by_rank", "lost_gpu_s", "youngest_victim_started_at_s", "missing_tasks", "spanning", "apart",
    "type_preference", "capacity_preference", "doubts", "away", "move_s", "crowding", "departures_per_h", "usd_per_h",
    "racks", "machines", "opened", "pieces",
)  # fmt: skip
WORST = PlanQuality(
    victims_by_rank=(1,) * 14, lost_gpu_s=1.0, youngest_victim_started_at_s=1.0, missing_tasks=1, spanning=1, apart=1,
    type_preference=1, capacity_preference=1, doubts=1, away=1, move_s=1.0, crowding=(1,) * 4, departures_per_h=1.0,
    usd_per_h=1.0, racks=1, machines=1, opened=1, pieces=1,
)  # fmt: skip


def _markdown() -> str:
    """Returns the criteria as a Markdown table, as `docs/scheduling.md` shows it."""
    rows = [f"| {number} | {one.metadata['says']} |" for number, one in enumerate(fields(PlanQuality), 1)]
    last = "| | last: the region that the slow path planned for it, then the smaller ids of region and machines |"
    return "\n".join(["| | a plan comes first if it has |", "| --- | --- |", *rows, last])


def test_the_order_of_the_criteria() -> None:
    """An earlier criterion decides, however much worse all later criteria are."""
    assert tuple(one.name for one in fields(PlanQuality)) == ORDER
    values = {name: getattr(WORST, name) for name in ORDER}
    for place, name in enumerate(ORDER):
        better = {earlier: values[earlier] for earlier in ORDER[:place]}
        huge = {later: (9,) * 14 if later in ("victims_by_rank", "crowding") else 1e9 for later in ORDER[place + 1 :]}
        assert PlanQuality(**better, **huge).key < WORST.key, name


def test_the_documentation_has_the_list(checkout: Path) -> None:
    """docs/scheduling.md has the table that is generated from the criteria."""
    assert _markdown() in (checkout / "docs" / "scheduling.md").read_text()
