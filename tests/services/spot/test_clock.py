"""The live controller with `spothedge+` on random fleets and a simulated clock, against the replay of each fleet."""

from statistics import fmean

import pytest

from rigs.spot_clock import run_fleet

_FEW, _MANY = (6, 9), range(1, 201)


@pytest.mark.parametrize("seeds", [_FEW, pytest.param(_MANY, marks=pytest.mark.long)], ids=["few", "many"])
def test_a_live_day_is_that_of_the_replay(seeds: tuple[int, ...]) -> None:
    """No granted machine is thrown away. On the mean, availability and cost are those of the replay with the same
    answers, and at most twice as many launches are requested as SpotHedge requests.
    """
    found = [run_fleet(seed) for seed in seeds]
    assert not sum(one.away for one in found)
    assert abs(fmean(one.points for one in found)) <= 0.5
    assert abs(fmean(one.cost for one in found)) <= 0.05
    assert fmean(one.launches for one in found) <= 2.0
