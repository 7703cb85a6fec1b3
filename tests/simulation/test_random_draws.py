"""Values that a trace lacks are drawn by rules, independently for each workload."""

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from infra.config.scheduling import SchedulerSettings
from infra.errors import ConfigurationError
from research.traces.draws import pick, sample
from research.traces.fleet import SimulatedFleet
from research.traces.rows import TraceRow
from research.traces.scenario import parse_scale
from research.traces.settings import TraceSettings
from research.traces.workloads import RowCompletion, scaled, sliced, tenants_of
from simulation.random_draws import chance
from simulation.settings import fit_lognormal, override
from simulation.workloads import SimulatedWorkload

DAY_S = 86400.0


def fleet(**more: object) -> SimulatedFleet:
    """Returns a fleet with a100 in three regions and v100 in one, the only one for gangs of more than 2 machines."""

    def machines(gpu_type: str, count: int) -> dict[str, object]:
        return {"name": gpu_type, "count": count, "gpus": 8, "gpu_type": gpu_type, "cpus": 64, "memory": "512GiB"}

    counts = {"east": {"a100": 2, "v100": 4}, "north": {"a100": 2}, "west": {"a100": 2}}
    regions = [
        {"name": region, "clusters": [{"name": "main", "machines": [machines(*pair) for pair in kinds.items()]}]}
        for region, kinds in counts.items()
    ]
    return SimulatedFleet.model_validate({"regions": regions, **more})


def bare(name: str, gpus: int = 1, tasks: int = 1, submit_s: float = 0.0, duration_s: float = 60.0) -> TraceRow:
    """Returns a row that has only the required values."""
    return TraceRow(name, submit_s, "vision", None, duration_s, tasks, gpus, None, None, None, None)


def complete(rows: list[TraceRow], seed: int = 0, **assumptions: object) -> list[SimulatedWorkload]:
    """Returns the rows as workloads of the fleet."""
    where = fleet()
    tenants = tenants_of(where, rows)[0]
    completion = RowCompletion(where, TraceSettings.model_validate(assumptions), seed)
    return [completion.workload(r, r.submit_s, 0.0, tenants[r.tenant]) for r in rows]


def test_priorities_follow_the_distribution() -> None:
    """Drawn levels follow MAST 4.2 (3, 20, 16, 54, 0.2, 0.5 and 6.3%) within one percentage point of 20,000 draws."""
    drawn = Counter(w.level for w in complete([bare(f"w{k}") for k in range(20_000)]))
    for level, percent in {1: 3, 2: 20, 3: 16, 4: 54, 5: 0.2, 6: 0.5, 7: 6.3}.items():
        assert drawn[level] / 200 == pytest.approx(percent, abs=1)


def test_a_workload_draws_the_same_in_any_company() -> None:
    """A workload's drawn values do not depend on the other rows or their order, only on the seed."""
    rows = [bare(f"w{k}") for k in range(200)]
    every = {w.id: w for w in complete(rows)}
    assert {w.id: w for w in complete(rows[::-7])} == {w.id: every[w.id] for w in complete(rows[::-7])}
    assert complete(rows) != complete(rows, seed=1)


def test_types_are_drawn_in_proportion_to_supply_where_two_regions_could_hold_the_gang() -> None:
    """GPU types are drawn by supply, among those for which two regions can hold the gang, if there are any."""
    small = {w.jobs[0].gpu_types for w in complete([bare(f"w{k}", 8) for k in range(50)])}
    large = {w.jobs[0].gpu_types for w in complete([bare(f"w{k}", 8, tasks=3) for k in range(50)])}
    assert small == {("a100",)}
    assert large == {("v100",)}
    assert {w.jobs[0].gpu_types for w in complete([bare("cpu", 0)])} == {()}


def test_regions_with_the_data_are_drawn_among_those_that_could_hold_it() -> None:
    """Regions with the data are drawn by the given percentages, among the regions that can hold the gang."""
    work = complete([bare(f"w{k}", 8) for k in range(3000)], candidate_regions_percent={1: 20, 2: 30})
    sizes = Counter(3 if w.regions is None else len(w.regions) for w in work)
    for size, percent in {1: 20, 2: 30, 3: 50}.items():
        assert sizes[size] / 30 == pytest.approx(percent, abs=3)
    assert {w.regions for w in complete([bare("w", 8, tasks=4)])} == {frozenset({"east"})}


def test_tables_say_where_a_workload_may_be() -> None:
    """A workload may run in the regions that have all of its tables in the fleet file; without tables, anywhere."""
    where = fleet(tables={"clicks": ["east", "west"], "pages": ["west", "north"]})
    completion, tenants = RowCompletion(where, where.simulation, 0), tenants_of(where, [bare("w")])[0]
    for tables, regions in (((), None), (("clicks",), {"east", "west"}), (("clicks", "pages"), {"west"})):
        drawn = completion.workload(replace(bare("w"), tables=tables), 0, 0, tenants["vision"])
        assert drawn.regions == (None if regions is None else frozenset(regions))


def test_a_level_is_never_above_its_tenants() -> None:
    """A workload's level is at most its tenant's: 2 becomes 3 for a tenant of level 3, and 5 stays."""
    where = fleet(tenants={"vision": {"level": 3}})
    completion, tenants = RowCompletion(where, where.simulation, 0), tenants_of(where, [])[0]
    drawn = [completion.workload(replace(bare("w"), priority=p), 0, 0, tenants["vision"]).level for p in (2, 5)]
    assert drawn == [3, 5]


def test_defaults_for_cpus_and_memory() -> None:
    """CPUs and memory have defaults per GPU, or per task for a task without GPUs."""
    (gpu,) = complete([bare("a", 2)])
    (cpu,) = complete([bare("b", 0)])
    assert (gpu.jobs[0].cpus_milli_per_task, gpu.jobs[0].memory_bytes_per_task) == (8000, 64 << 30)
    assert (cpu.jobs[0].cpus_milli_per_task, cpu.jobs[0].memory_bytes_per_task) == (1000, 4 << 30)


def test_scale_multiplies_arrivals_and_keeps_their_shape() -> None:
    """A scale of 2.5 adds copies within a week and half an hour of their originals, which stay unchanged."""
    rows = [bare(f"w{k:04d}", submit_s=k * 3600.0) for k in range(2000)]
    copies = scaled(rows, {0: 2.5}, 0, 7, 1800.0)
    assert len(copies) == pytest.approx(5000, abs=60)
    assert [r for r in copies if "~" not in r.workload_id] == rows
    by_id = {r.workload_id: r for r in rows}
    for copy in copies:
        original = by_id[copy.workload_id.split("~")[0]]
        assert abs(copy.submit_s - original.submit_s) <= 7 * DAY_S + 1800
        assert (copy.duration_s, copy.gpus, copy.tenant) == (original.duration_s, original.gpus, original.tenant)
    hours = Counter(int(r.submit_s % DAY_S // 3600) for r in copies)
    assert max(hours.values()) / min(hours.values()) < 1.5


def test_scale_below_one_thins() -> None:
    """A scale of 0.1 keeps about a tenth of the rows and makes no copies; a scale of 1 keeps all."""
    rows = [bare(f"w{k}") for k in range(2000)]
    assert scaled(rows, {0: 1.0}, 0, 7, 1800.0) == sorted(rows, key=lambda r: r.workload_id)
    assert len(scaled(rows, {0: 0.1}, 0, 7, 1800.0)) == pytest.approx(200, abs=50)


def test_large_gangs_may_be_scaled_apart() -> None:
    """Gangs of 8 GPUs and more can have a scale of their own."""
    rows = [bare("small", 4), bare("eight", 8), bare("large", 8, tasks=2)]
    assert Counter(r.workload_id.split("~")[0] for r in scaled(rows, parse_scale("1,8+=3"), 0, 7, 0.0)) == {
        "small": 1,
        "eight": 3,
        "large": 3,
    }
    assert parse_scale("2") == {0: 2}
    for wrong in ("", "0", "x", "8+=", "1,8=3", "1.2.3", "inf"):
        with pytest.raises(ConfigurationError, match="must be a number above 0"):
            parse_scale(wrong)


def test_a_slice_has_what_was_running_when_it_began() -> None:
    """A slice also has the workloads that run at its start, with their age and the rest of their work."""
    rows = [bare("over", duration_s=50), bare("runs", submit_s=10, duration_s=500), bare("in", submit_s=150)]
    rows.append(bare("after", submit_s=300))
    found = {r.workload_id: (r.submit_s, r.duration_s, at) for r, at in sliced(rows, 100, 200)}
    assert found == {"runs": (10, 410, 100), "in": (150, 60, 150)}


def test_quotas_are_shares_of_supply_in_proportion_to_gpu_hours() -> None:
    """Quotas divide 0.9 of 48 and 32 slots by GPU hours, three to one, with no slot lost to rounding."""
    rows = [bare("a", duration_s=3000), replace(bare("b", duration_s=1000), tenant="nlp")]
    tenants = tenants_of(fleet(), rows)[0]
    assert {name: t.quota_gpus for name, t in tenants.items()} == {
        "nlp": {"a100": 11, "v100": 7},
        "vision": {"a100": 32, "v100": 21},
    }
    equal = tenants_of(fleet(quotas={"in_proportion_to": "equal", "of_supply": 1, "level": 2}), rows)[0]
    assert {t.level for t in equal.values()} == {2}
    assert equal["nlp"].quota_gpus == equal["vision"].quota_gpus == {"a100": 24, "v100": 16}


def test_a_tenant_that_the_file_does_not_name_is_bad_unless_there_is_a_rule() -> None:
    """A tenant that the file does not name is bad unless `quotas` has a rule, which gives it quotas."""
    named = {"tenants": {"nlp": {"level": 2, "quota": {"a100": 8}}}}
    bad = tenants_of(fleet(**named), [bare("w")])[1]
    assert [(b.column, b.value) for b in bad] == [("tenant", "vision")]
    tenants, bad = tenants_of(fleet(**named, quotas={}), [bare("w")])
    assert not bad
    assert tenants["nlp"].quota_gpus == {"a100": 8}
    assert tenants["vision"].quota_gpus == {"a100": 43, "v100": 28}


def test_the_lognormal_fits_the_three_quantiles() -> None:
    """MAST 5.5: the median is exact, and P90 and P99 are within 1%."""
    chosen = TraceSettings()
    assert chosen.provisioning_s(0.5) == pytest.approx(150)
    assert chosen.provisioning_s(0.9) == pytest.approx(278, rel=0.01)
    assert chosen.provisioning_s(0.99) == pytest.approx(449, rel=0.01)
    assert fit_lognormal(150, 278, 449)[1] == pytest.approx(0.474, abs=0.001)


@given(st.integers(), st.text(max_size=5), st.text(max_size=5))
def test_chance_is_between_0_and_1(seed: int, what: str, whose: str) -> None:
    """`chance` is between 0 and 1, and depends only on its arguments."""
    assert 0 < chance(seed, what, whose) == chance(seed, what, whose) < 1


@settings(max_examples=50)
@given(st.sets(st.sampled_from("abcdefgh"), min_size=2), st.integers(1, 8), st.integers(0, 100))
def test_a_sample_is_stable(among: set[str], count: int, seed: int) -> None:
    """One more element to choose from replaces at most one of the chosen elements."""
    chosen = set(sample(seed, "x", "w", sorted(among), count))
    assert len(chosen) == min(count, len(among))
    assert len(chosen - set(sample(seed, "x", "w", sorted(among | {"z"}), count))) <= 1


def test_pick_is_by_weight() -> None:
    """An element is picked by its share of the total weight, in the given order; weight 0 is never picked."""
    weights = {"none": 0.0, "a": 1.0, "b": 3.0}
    assert [pick(at, weights) for at in (0.0, 0.24, 0.26, 0.999)] == ["a", "a", "b", "b"]
    with pytest.raises(ValueError, match="at least one must be above 0"):
        pick(0.5, {"a": 0.0})


def test_assumptions_are_overridden_by_name() -> None:
    """Assumptions and keys of mappings are overridden by name; the error for an unknown name lists the known ones."""
    chosen = override(TraceSettings(), ("eviction_s=30", "objective_s.1=60", "priority_percent.7=0.5"))
    assert (chosen.eviction_s, chosen.objective_s[1], chosen.objective_s[2]) == (30, 60, 300)
    for wrong, says in (
        ("eviction=30", "must be NAME=VALUE, where NAME is one of: provisioning_p50_s"),
        ("objective_s=3", "objective_s.KEY"),
        ("eviction_s=soon", "eviction_s: must be a number, it is 'soon'"),
        ("objective_s.9=3", "must be a level from 1 \\(highest\\) to 7, it is '9'"),
        ("priority_percent.1=99", "sum to at most 100"),
    ):
        with pytest.raises(ConfigurationError, match=says):
            override(TraceSettings(), (wrong,))


def test_the_simulators_defaults_are_the_live_ones() -> None:
    """A setting that the simulator shares with the scheduler has the same default in both."""
    live, simulated = SchedulerSettings().model_dump(), TraceSettings().model_dump()
    shared = live.keys() & simulated.keys()
    assert shared >= {"min_runtime_s", "reserve_after_s", "batch", "w_age", "age_cap_s", "w_fair", "fair_window_s"}
    assert {name: simulated[name] for name in shared} == {name: live[name] for name in shared}
    assert simulated["full_scan_s"] == live["scan_interval_s"]
