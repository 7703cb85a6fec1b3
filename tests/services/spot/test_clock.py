"""The live controller with `spothedge+` on random fleets and a simulated clock, against the replay of each fleet."""

from statistics import fmean

import pytest

from rigs.spot_clock import run_fleet
from rigs.spot_fleets import RecordedAnswers, SpotReplicaCourse, with_own_grants

_FEW, _MANY = (6, 9), range(1, 201)


@pytest.mark.rotating
@pytest.mark.parametrize("seeds", [_FEW, pytest.param(_MANY, marks=pytest.mark.long)], ids=["few", "many"])
def test_a_live_day_is_that_of_the_replay(seeds: tuple[int, ...]) -> None:
    """No granted machine is thrown away. The availability and the cost of each day are those of the replay that has the
    same answers and times of decisions; on the mean, also those of the replay without delays. On the mean, at most
    twice as many launches are requested as SpotHedge requests.
    """
    found = [run_fleet(seed) for seed in seeds]
    assert not sum(one.same.away for one in found)
    assert max(abs(one.same.points) for one in found) <= 0.01
    assert max(abs(one.same.cost) for one in found) <= 0.001
    assert abs(fmean(one.free.points for one in found)) <= 0.5
    assert abs(fmean(one.free.cost for one in found)) <= 0.05
    assert fmean(one.same.launches for one in found) <= 2.0


def test_a_replay_has_the_answers_of_the_live_service() -> None:
    """A launch is answered after as long as the live launch that was nearest in time and had the same answer.

    Launches of the same time have the answers of several live launches of about the same time. Cold starts likewise.
    """
    courses = [
        SpotReplicaCourse(True, "a", 0.0, 7.0, 100.0, 9000.0, None),
        SpotReplicaCourse(True, "a", 6000.0, 6040.0, 6100.0, 9000.0, None),
        SpotReplicaCourse(True, "a", 6000.0, 6050.0, None, 9000.0, None),
        SpotReplicaCourse(True, "a", 6000.0, None, None, 6005.0, "refused"),
        SpotReplicaCourse(False, None, 0.0, 1.0, None, 9000.0, None),
    ]
    answers = RecordedAnswers.of(courses, 60.0)
    asked = [("a", 0, True), ("b", 0, True), ("a", 95, True), ("b", 95, True), ("a", 0, False), (None, 95, True)]
    found = [answers.next(zone, tick, has_room=has_room) for zone, tick, has_room in asked]
    assert found == [(True, 7.0), (True, 7.0), (True, 40.0), (True, 50.0), (False, 5.0), (True, 1.0)]
    assert [answers.cold_start_s("a", tick) for tick in (0, 95)] == [93.0, 60.0]
    assert answers.cold_start_s(None, 0) is None


def test_exchanged_machines_do_not_change_when_launches_were_granted() -> None:
    """A replica that gets the machine of one that has ended was not granted before it was launched."""
    courses = [
        SpotReplicaCourse(False, None, 2000.0, 1050.0, 2100.0, 9000.0, None),
        SpotReplicaCourse(False, None, 1000.0, 2040.0, 1100.0, 2030.0, "scaled_down"),
        SpotReplicaCourse(True, "a", 1000.0, None, None, 1005.0, "refused"),
        SpotReplicaCourse(True, "a", 1000.0, 1060.0, 1100.0, 9000.0, None),
    ]
    assert [one.granted_s for one in with_own_grants(courses)] == [2040.0, 1050.0, None, 1060.0]
