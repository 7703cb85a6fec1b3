"""Which tiers a save reaches: Young's interval for each class of failures, from measured writes."""

from math import sqrt

import pytest

from mizzen.cadence import Mtbf
from mizzen.checkpoint.tier_cadence import TierCadence, Tiers

MACHINE = Mtbf(20_000.0, "scheduler", "as the scheduler says")


class _Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def _saved(cadence: TierCadence, clock: _Clock, tier: int, write_s: float) -> None:
    clock.now_s += write_s
    cadence.written(tier, clock.now_s - write_s)


@pytest.mark.parametrize(
    ("holds", "background", "expected_s"),
    [(0, False, sqrt(2 * 10_000 * 8)), (1, False, sqrt(2 * 20_000 * 8)), (2, False, sqrt(2 * 200_000 * 8)),
     (2, True, sqrt(2 * 200_000 * 0.8))],
)  # fmt: skip
def test_each_class_of_failures_has_its_interval(holds: int, background: bool, expected_s: float) -> None:
    """The root is saved to after Young's interval for the failures that the memory tier does not survive."""
    clock = _Clock()
    cadence = TierCadence(Tiers(), MACHINE, 2, clock)
    assert cadence.reach(background) == 2
    _saved(cadence, clock, 0, 0.1)
    cadence.holds(holds)
    _saved(cadence, clock, 1, 8.0)
    ended_s = clock.now_s
    clock.now_s = ended_s + expected_s * 0.999
    assert cadence.reach(background) == 1
    clock.now_s = ended_s + expected_s * 1.001
    assert cadence.reach(background) == 2


def test_settings_have_precedence() -> None:
    """Each mean time of `Tiers` replaces the derived one."""
    tiers = Tiers(process_mtbf_s=100, machine_mtbf_s=3000, both_mtbf_s=70_000)
    cadence, clock = TierCadence(tiers, MACHINE, 2, clock := _Clock()), clock
    _saved(cadence, clock, 1, 0.01)
    found = []
    for holds in range(3):
        cadence.holds(holds)
        found.append(cadence.interval_s(1, background=False))
    assert found == pytest.approx([sqrt(2 * mtbf_s * 0.01) for mtbf_s in (100, 3000, 70_000)])
    assert tiers.process_mtbf(MACHINE).mtbf_s == 100
    assert Tiers(machine_mtbf_s=50).process_mtbf(MACHINE).mtbf_s == 25


def test_measured_rates_replace_the_derived_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler's rates for each machine hour are those of the gang; a process is lost with its machine, too, and
    two machines are not lost more often than one.
    """
    monkeypatch.setenv("MIZZEN_GANG_MACHINES", "4")
    for process, both, expected in (
        (0.5, 0.001, (1800.0, 20_000.0, 900_000.0)),
        (0.001, 9.0, (20_000.0, 20_000.0, 20_000.0)),
    ):
        monkeypatch.setenv("MIZZEN_PROCESS_HAZARD_PER_H", str(process))
        monkeypatch.setenv("MIZZEN_BOTH_HAZARD_PER_H", str(both))
        clock = _Clock()
        cadence = TierCadence(Tiers(), MACHINE, 2, clock)
        _saved(cadence, clock, 1, 0.01)
        for holds in range(3):
            cadence.holds(holds)
            assert cadence.interval_s(1, background=False) == pytest.approx(sqrt(2 * expected[holds] * 0.01))
    assert Tiers(process_mtbf_s=7).process_mtbf(MACHINE).mtbf_s == 7
    monkeypatch.setenv("MIZZEN_PROCESS_HAZARD_PER_H", "often")
    with pytest.raises(ValueError, match="MIZZEN_PROCESS_HAZARD_PER_H='often': must be more than 0"):
        TierCadence(Tiers(), MACHINE, 2)


def test_a_slow_tier_is_written_at_most_half_of_the_time() -> None:
    """The interval is at least twice the time of a write."""
    cadence, clock = TierCadence(Tiers(both_mtbf_s=10), MACHINE, 2, clock := _Clock()), clock
    _saved(cadence, clock, 1, 100.0)
    cadence.holds(2)
    assert cadence.interval_s(1, background=True) == 200


def test_a_tier_that_has_failed_is_left_out_for_a_minute() -> None:
    """The others are then saved to as if it did not exist."""
    clock = _Clock()
    cadence = TierCadence(Tiers(), MACHINE, 3, clock)
    for tier in range(3):
        _saved(cadence, clock, tier, 1.0)
    cadence.holds(0)
    cadence.failed(0)
    assert cadence.reach(background=False) == 0
    clock.now_s += 61
    assert cadence.reach(background=False) == 1
    clock.now_s += sqrt(2 * 10_000)
    assert cadence.reach(background=False) == 3
