"""P2's scores of buildings against plain arithmetic."""

from math import exp

import pytest

from reclaim.buildings import (
    BUILDING_MBIT,
    MACHINE_MBIT,
    RESTART_S,
    Building,
    BuildingScore,
    DepartedJob,
    Rate,
    Rules,
    score,
)

C = 3.2e9
SITE_MBIT = 4000.0
MBIT = 125_000.0
CAMPUS = (
    Building("campus", "a", store="file:///a", rate=Rate(0.2, 0.2)),
    Building("campus", "b", store="file:///b", link_mbit=100, rate=Rate(0.01, 0.01)),
    Building("campus", "c", link_mbit=1000),
    Building("other", "d", rate=Rate(1.0, 1.0)),
)
"""Buildings `a` and `b` have stores; `c` uses the store of its site, and `d` is on another site."""
LINKS = {"a": BUILDING_MBIT, "b": 100.0, "c": 1000.0, "d": BUILDING_MBIT}


def _path_s(source: str, target: str) -> float:
    """Returns the time of a checkpoint from the store of one building to a machine in another one, in seconds."""
    own = source in "ab"
    links = [MACHINE_MBIT]
    if source != target or not own:
        links += [LINKS[target]] + ([LINKS[source]] if own else [])
    if (source == "d") != (target == "d"):
        links.append(SITE_MBIT)
    return C / (min(links) * MBIT)


def _upload_s(source: str) -> float:
    return C / (min(MACHINE_MBIT, MACHINE_MBIT if source in "ab" else LINKS[source]) * MBIT)


def _plain_s(home: str, write_s: float, remaining_s: float, alpha: float) -> list[float]:
    found = []
    for building in CAMPUS:
        at = building.name
        migration_s = max(write_s, _upload_s(home)) + _path_s(home, at) + RESTART_S
        others = [other.name for other in CAMPUS for _ in range(2)]
        others.remove(at)  # The machine at which the job is; the building has another one.
        next_s = _upload_s(at) + sum(_path_s(at, other) for other in others) / len(others) + RESTART_S
        leaves = 1 - exp(-building.rate.near * remaining_s / 3600)
        found.append(migration_s + alpha * leaves * next_s)
    return found


@pytest.mark.parametrize("home", "abcd")
@pytest.mark.parametrize(("write_s", "remaining_s", "alpha"), [(60.0, 7200.0, 1.0), (500.0, 36000.0, 2.0)])
def test_the_score_is_equation_11(home: str, write_s: float, remaining_s: float, alpha: float) -> None:
    """C/bw(s, store) + C/bw(store, d) + T_r + alpha (1 - S_d(T_rem)) T_mig_mean(d), for every source."""
    site = "other" if home == "d" else "campus"
    job = DepartedJob(site, home, C, write_s, remaining_s, local_candidates=1)
    found = score(CAMPUS, job, Rules(alpha=alpha))
    assert [one.score_s for one in found] == pytest.approx(_plain_s(home, write_s, remaining_s, alpha), rel=1e-9)
    assert not any(one.away for one in found)


def test_the_same_building_comes_first_only_if_enough_machines_there_have_room() -> None:
    """With k_min candidates, all other buildings are behind; the scores are the same."""
    few, enough = (score(CAMPUS, DepartedJob("campus", "a", C, None, 60.0, n)) for n in (1, 2))
    assert [one.away for one in enough] == [False, True, True, True]
    assert tuple(BuildingScore(False, one.score_s) for one in enough) == few


def test_a_store_that_two_buildings_share_is_in_neither() -> None:
    """A checkpoint in it passes the link of the building, as one in the region's bucket does."""
    shared = tuple(Building("s", name, store="s3://both") for name in "ab")
    bucket = tuple(Building("s", name) for name in "ab")
    job = DepartedJob("s", "a", C, None, 60.0, 0)
    assert score(shared, job) == score(bucket, job)


def test_an_unknown_building_is_named() -> None:
    """The error names the building of the job."""
    with pytest.raises(ValueError, match="campus/x: must be one of the 4 buildings"):
        score(CAMPUS, DepartedJob("campus", "x", C, None, 60.0, 0))
