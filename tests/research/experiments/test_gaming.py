"""The strategies of the gaming experiment keep the work the same, and do over time what they say."""

from collections import defaultdict
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from domain.scheduling import JobRequest
from research.experiments.cases import ExperimentCase
from research.experiments.gaming import main
from research.experiments.persons import play
from research.experiments.store import OutcomeStore
from research.experiments.strategies import HONEST, STRATEGIES, GamingStrategy, persons, rewritten
from simulation.scenario import Scenario
from simulation.workloads import SimulatedWorkload
from tests.research.experiments.conftest import SHORT
from tests.simulation.scenarios import SURE, machines, scenario, workload

ME = ("vision", "me")


@st.composite
def pieces(draw: st.DrawFn) -> SimulatedWorkload:
    """Draws a workload of one job."""
    tasks, gpus = draw(st.integers(1, 4)), draw(st.sampled_from((0, 1, 2, 4, 6, 8)))
    job = JobRequest("main", tasks, gpus, ("a100",) if gpus else (), 1000 * max(1, gpus), (1 << 30) * max(1, gpus))
    duration_s = draw(st.floats(1.0, 2e5))
    limit_s = duration_s * draw(st.floats(1.0, 20.0))
    return SimulatedWorkload(
        "w", "vision", draw(st.integers(2, 7)), 50.0, 50.0, duration_s, (job,), None, limit_s, "me"
    )


@pytest.mark.parametrize("name", STRATEGIES)
@given(piece=pieces())
def test_a_strategy_keeps_the_work(name: str, piece: SimulatedWorkload) -> None:
    """GPU seconds, core seconds and memory are those of the piece; what the API refuses is not asked for."""
    made = rewritten(piece, STRATEGIES[name], 2)
    ids = [w.id for w in made.workloads]
    assert len(set(ids)) == len(ids) and made.origin == piece
    for what in ("gpus", "cpus_milli", "memory_bytes_per_task"):
        lanes = [sum(w.duration_s * _amount(w, what) for w in lane) for lane in made.lanes]
        honest = piece.duration_s * _amount(piece, what)
        for amount in lanes if made.copies else [sum(lanes)]:
            assert amount == pytest.approx(honest, rel=1e-9)
    for lane in made.lanes:
        assert lane[0].arrives_s < inf and all(w.arrives_s == inf for w in lane[1:])
        assert sum(w.duration_s for w in lane) == pytest.approx(piece.duration_s)
    for w in made.workloads:
        assert 2 <= w.level <= piece.level and w.tenant == piece.tenant and w.max_runtime_s >= w.duration_s
        assert 0 <= w.submit_s <= piece.submit_s


def _amount(w: SimulatedWorkload, what: str) -> int:
    (job,) = w.jobs
    return job.tasks * job.memory_bytes_per_task if what == "memory_bytes_per_task" else getattr(job, what)


def test_persons_are_those_with_most_submissions_of_the_largest_tenants() -> None:
    """Submissions outside the span do not count."""
    rows = [("a", "u"), ("a", "v"), ("a", "v"), ("b", "u"), ("b", "u"), ("c", "u")]
    work = [replace(workload(f"w{k}", tenant=t), user=user) for k, (t, user) in enumerate(rows)]
    early = [replace(workload(f"e{k}", tenant="c"), user="u", submit_s=-1.0) for k in range(9)]
    assert persons([*early, *work], 0.0, 1.0, 2) == {("a", "v"), ("b", "u")}


def _scene(*work: SimulatedWorkload) -> Scenario:
    return scenario(machines("east", 1), list(work), settings=SURE.model_copy(update={"provisioning_p50_s": 0.0}))


def _mine(name: str, submit_s: float, duration_s: float, gpus: int = 8) -> SimulatedWorkload:
    return replace(workload(name, gpus, submit_s, duration_s), user="me", max_runtime_s=2 * duration_s)


def _played(strategy: GamingStrategy, *work: SimulatedWorkload) -> dict[str, dict[str, float]]:
    """Returns the figures of the pieces of `ME`, by id; times in seconds."""
    actions = play(_scene(*work), strategy, {ME})
    found = {piece.origin.id: actions.figures(piece, 1e6) for piece in actions.pieces}
    return {id_: {name: round(3600 * value) for name, value in one.items()} for id_, one in found.items()}


def test_a_chain_is_submitted_part_by_part() -> None:
    """Each part waits anew: the one of another person that was submitted in between runs first."""
    other = replace(workload("other", 8, 100.0, 500.0), user="you", max_runtime_s=500.0)
    honest = _played(HONEST, _mine("w", 0.0, 7200.0), other)["w"]
    assert honest["wait_h"] == honest["delay_h"] == 0 and honest["worked_gpu_h"] == 8 * 7200
    split = _played(STRATEGIES["hours"], _mine("w", 0.0, 7200.0), other)["w"]
    assert split["worked_gpu_h"] == 8 * 7200
    assert 500 <= split["wait_h"] <= 505 and 500 <= split["delay_h"] <= 505


def test_one_copy_works() -> None:
    """Of three copies, two end without work, whether they waited or were awarded in the same pass."""
    for gpus in (8, 2):
        found = _played(STRATEGIES["copies"], _mine("w", 0.0, 1000.0, gpus), _mine("next", 10.0, 100.0))
        assert found["w"] == {"wait_h": 0, "delay_h": 0, "worked_gpu_h": 1000 * gpus}
        assert 990 <= found["next"]["wait_h"] <= 1000 and found["next"]["worked_gpu_h"] == 800


def test_slots_wait_for_work() -> None:
    """A workload that starts before its work can begin holds its slots, and then works for its whole duration."""
    found = _played(STRATEGIES["early"], _mine("w", 3000.0, 1000.0), _mine("late", 5000.0, 100.0))
    assert found["w"] == {"wait_h": 0, "delay_h": 0, "worked_gpu_h": 8000}
    assert found["late"] == {"wait_h": 0, "delay_h": 0, "worked_gpu_h": 800}


def test_a_new_submission_has_no_age() -> None:
    """Of two equal workloads the earlier one runs first, unless its person has cancelled it in the meantime."""
    holder = replace(workload("holder", 8, 0.0, 2000.0), user="x", max_runtime_s=2000.0)
    other = replace(workload("other", 8, 20.0, 1000.0), user="y", max_runtime_s=2000.0)
    mine = _mine("w", 10.0, 1000.0)
    waits: dict[str, float] = defaultdict(float)
    for name, strategy in (("honest", HONEST), ("resubmit", STRATEGIES["resubmit"])):
        waits[name] = _played(strategy, holder, mine, other)["w"]["wait_h"]
    assert 1985 <= waits["honest"] <= 1995
    assert 2985 <= waits["resubmit"] <= 2995


@pytest.mark.long
def test_the_command_writes_a_table(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The whole way from the trace to the table; a second call runs nothing."""
    monkeypatch.setattr("research.experiments.gaming.SIZES", SHORT)
    arguments = ["gaming", "--out", str(tmp_path), "--seeds", "0", "1", "--strategies", "names", "level", "--jobs", "1"]
    monkeypatch.setattr("sys.argv", arguments)
    main()
    said = capsys.readouterr().out
    assert "| names | " in said and "synthetic-drawn-1.2-0: 3 runs" in said
    main()
    assert "synthetic-drawn-1.2-0: 0 runs" in capsys.readouterr().out
    case = ExperimentCase("synthetic", 1.2, 0)
    assert OutcomeStore(None, tmp_path / "gaming", SHORT).read(case, "gaming-names")
