"""The save interval: formulas against a numeric minimum, sources of the MTBF, and explanations of a choice."""

import subprocess
import sys
from math import inf, nan, sqrt
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import mizzen
from mizzen.cadence import PLATFORMS, UNKNOWN, best_interval_s, choose, expected_time, mtbf, mtbf_of_environ
from mizzen.cadence.formula import SMALL, whole_steps

TIMES = st.floats(1e-3, 1e8)
SAVES = st.floats(0, 1e8)


def least(mtbf_s: float, save_s: float) -> float:
    """Returns the least expected time over all intervals, by ternary search: the function has a single minimum."""
    low, high = 0.0, 2 * mtbf_s
    for _ in range(200):
        a, b = low + (high - low) / 3, high - (high - low) / 3
        if expected_time(mtbf_s, save_s, a) < expected_time(mtbf_s, save_s, b):
            high = b
        else:
            low = a
    return expected_time(mtbf_s, save_s, (low + high) / 2)


@given(st.floats(1, 1e7), st.floats(1e-6, 10))
def test_the_interval_is_next_to_the_best(mtbf_s: float, part: float) -> None:
    """For saves of 1e-6 to 10 times the MTBF, the chosen interval is within 0.15% of the least expected time."""
    save_s = part * mtbf_s
    chosen_s, _ = best_interval_s(mtbf_s, save_s)
    assert expected_time(mtbf_s, save_s, chosen_s) <= 1.0015 * least(mtbf_s, save_s)


@given(st.floats(1, 1e7), st.floats(1e-6, SMALL))
def test_where_a_save_is_short_youngs_form_is_enough(mtbf_s: float, part: float) -> None:
    """If a save takes at most 1/100 of the MTBF, Young's interval is within 0.02% of the least expected time."""
    found_s, rule = best_interval_s(mtbf_s, part * mtbf_s)
    assert rule == "young" and found_s == pytest.approx(sqrt(2 * part) * mtbf_s)
    assert expected_time(mtbf_s, part * mtbf_s, found_s) <= 1.0002 * least(mtbf_s, part * mtbf_s)


@pytest.mark.parametrize(("save_s", "rule"), [(0.01, "young"), (0.0101, "daly"), (1.999, "daly"), (2.0, "mtbf")])
def test_which_form_is_taken(save_s: float, rule: str) -> None:
    """Young's formula is used for saves up to 1/100 of the MTBF, Daly's up to twice the MTBF, and the MTBF beyond."""
    assert best_interval_s(1.0, save_s)[1] == rule


def test_dalys_form() -> None:
    """Daly's interval is sqrt(2 C mu) (1 + sqrt(C / 2 mu) / 3 + (C / 2 mu) / 9) - C; here C = mu / 8."""
    assert best_interval_s(8.0, 1.0) == (pytest.approx(8 * (0.5 * (1 + 1 / 12 + 1 / 144) - 1 / 8)), "daly")


@given(TIMES, TIMES, SAVES)
def test_rarer_interruptions_never_make_it_save_more_often(one_s: float, other_s: float, save_s: float) -> None:
    """The interval does not shrink as the MTBF grows, also across the boundaries between the formulas."""
    low_s, high_s = sorted((one_s, other_s))
    assert best_interval_s(low_s, save_s)[0] <= best_interval_s(high_s, save_s)[0] * (1 + 1e-9)


@given(TIMES, SAVES, SAVES)
def test_dearer_saves_never_make_it_save_more_often(mtbf_s: float, one_s: float, other_s: float) -> None:
    """The interval does not shrink as saves take longer, also across the boundaries between the formulas."""
    low_s, high_s = sorted((one_s, other_s))
    assert best_interval_s(mtbf_s, low_s)[0] <= best_interval_s(mtbf_s, high_s)[0] * (1 + 1e-9)


@pytest.mark.parametrize("joint", [SMALL, 2.0])
def test_the_forms_meet(joint: float) -> None:
    """The interval is a continuous function of the save time at the boundaries between the formulas."""
    before_s, _ = best_interval_s(1000.0, joint * 1000 * (1 - 1e-9))
    after_s, _ = best_interval_s(1000.0, joint * 1000 * (1 + 1e-9))
    assert after_s == pytest.approx(before_s, rel=1e-6)


@given(TIMES, SAVES, st.floats(1e-6, 1e8), st.none() | st.floats(0, 1e8), st.floats(0, 1e6))
def test_whole_steps_are_rounded_down(
    mtbf_s: float, save_s: float, step_s: float, interval_s: float | None, write_s: float
) -> None:
    """The chosen number of steps is the greatest whose time does not exceed the interval, and at least 1."""
    choice = choose(mtbf(gang_mtbf_s=mtbf_s), save_s, step_s, interval_s=interval_s, write_s=write_s)
    assert choice.steps >= 1
    assert choice.steps == 1 or choice.steps * step_s <= choice.interval_s * (1 + 1e-9)
    assert (choice.steps + 1) * step_s > choice.interval_s * (1 - 1e-9)
    assert len(choice.sentences()) == 5


def test_a_division_that_comes_out_even_keeps_its_last_step() -> None:
    """0.3 s holds three steps of 0.1 s, although 0.3 / 0.1 is less than 3 in floating point."""
    assert whole_steps(0.3, 0.1) == 3 and whole_steps(0.29, 0.1) == 2


def test_the_worked_example() -> None:
    """With an MTBF of 3 hours and saves of 30 s, the interval is 805 s: 402 steps of 2 s. The text has the figures."""
    choice = choose(mtbf(gang_mtbf_s=3 * 3600), 30, 2)
    assert choice.interval_s == pytest.approx(804.98, abs=0.01) and choice.steps == 402 and choice.rule == "young"
    text = " ".join(choice.sentences())
    for part in ("10,800 s", "30 s", "805 s", "402 whole steps", "804 s", "7.8% more time"):
        assert part in text


def test_an_interval_that_was_set_wins() -> None:
    """A fixed interval takes precedence over the formula and the write time; with 0 every step is saved."""
    found = mtbf(gang_mtbf_s=10_800)
    told = choose(found, 30, 2, interval_s=100, write_s=500)
    assert (told.interval_s, told.steps, told.rule) == (100, 50, "told")
    assert choose(found, 30, 2, interval_s=0).steps == 1


def test_a_write_in_the_background_is_the_shortest_interval() -> None:
    """The time of a background write is a lower bound of the interval."""
    found = mtbf(gang_mtbf_s=10_000)
    assert choose(found, 0.5, 1, write_s=99).interval_s == choose(found, 0.5, 1).interval_s == pytest.approx(100)
    longer = choose(found, 0.5, 1, write_s=300)
    assert (longer.interval_s, longer.rule) == (300, "write")
    assert longer.overhead > choose(found, 0.5, 1).overhead
    assert longer.durable_s == 300.5


def test_the_order_of_the_sources() -> None:
    """The sources of the MTBF by precedence: the scheduler, the hazard times the machines, the platform's prior."""
    every = {"gang_mtbf_s": 500.0, "machine_hazard_per_h": 0.1, "machines": 10, "platform": "azure-spot"}
    first = mtbf(**every)  # type: ignore[arg-type]
    assert (first.mtbf_s, first.source) == (500.0, "scheduler")
    second = mtbf(machine_hazard_per_h=0.1, machines=10, platform="azure-spot")
    assert (second.mtbf_s, second.source) == (3600.0, "hazard")
    third = mtbf(machines=10, platform="azure-spot")
    assert (third.mtbf_s, third.source) == (2 * 3600.0, "platform")
    assert mtbf().mtbf_s == PLATFORMS[UNKNOWN].hours * 3600


@given(st.integers(1, 10_000))
def test_what_is_the_gangs_is_not_divided_again(machines: int) -> None:
    """The hazard's MTBF is divided by the number of machines; the scheduler's and Slurm's are of the whole gang."""
    assert mtbf(gang_mtbf_s=700, machines=machines).mtbf_s == 700
    assert mtbf(machine_hazard_per_h=1, machines=machines).mtbf_s == pytest.approx(3600 / machines)
    of_gang = mtbf(platform="slurm", machines=machines)
    assert of_gang.mtbf_s == PLATFORMS["slurm"].hours * 3600


def test_a_hazard_of_nothing_is_nothing_known() -> None:
    """If the hazard is 0, as in a zone without interruptions yet, the platform's prior is used."""
    assert mtbf(machine_hazard_per_h=0, platform="spot").source == "platform"


@pytest.mark.parametrize("name", PLATFORMS)
def test_every_prior_says_why(name: str) -> None:
    """Each prior has a positive number of hours and a reason, which the MTBF's explanation includes."""
    prior = PLATFORMS[name]
    assert 0 < prior.hours <= 10_000 and prior.why in mtbf(platform=name).why and name in mtbf(platform=name).why


def test_priors_are_documented(checkout: Path) -> None:
    """The table in docs/cadence.md has the hours and the reason of each prior."""
    text = (checkout / "docs/cadence.md").read_text()
    for name, prior in PLATFORMS.items():
        whose = "gang" if prior.of_gang else "machine"
        assert f"| `{name}` | {prior.hours:g} h of a {whose} | {prior.why} |" in text


def test_the_environment() -> None:
    """Each variable is read, and an empty one counts as absent. The machines default to the launcher's variables."""
    assert mtbf_of_environ({"MIZZEN_GANG_MTBF_S": "7200", "MIZZEN_MACHINE_HAZARD_PER_H": "1"}).mtbf_s == 7200
    hazard = {"MIZZEN_GANG_MTBF_S": "", "MIZZEN_MACHINE_HAZARD_PER_H": "0.5"}
    assert mtbf_of_environ(hazard).mtbf_s == 7200
    assert mtbf_of_environ({**hazard, "MIZZEN_GANG_MACHINES": "4"}).mtbf_s == 1800
    assert mtbf_of_environ({**hazard, "WORLD_SIZE": "9", "LOCAL_WORLD_SIZE": "4"}).mtbf_s == 2400
    assert mtbf_of_environ({**hazard, "WORLD_SIZE": "9"}).mtbf_s == 7200
    assert mtbf_of_environ({}, platform="spot").mtbf_s == 24 * 3600
    assert mtbf_of_environ({"MIZZEN_PLATFORM": "azure-spot"}, platform="spot").mtbf_s == 20 * 3600
    assert mtbf_of_environ({"MIZZEN_PLATFORM": "azure"}).mtbf_s == mtbf_of_environ({}, platform="azure").mtbf_s
    assert mtbf_of_environ({"MIZZEN_PLATFORM": "azure"}).mtbf_s == 20 * 3600


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("MIZZEN_GANG_MTBF_S", "0"), ("MIZZEN_GANG_MTBF_S", "3h"), ("MIZZEN_GANG_MTBF_S", "nan"),
        ("MIZZEN_MACHINE_HAZARD_PER_H", "-1"), ("MIZZEN_MACHINE_HAZARD_PER_H", "inf"),
        ("MIZZEN_GANG_MACHINES", "0"), ("MIZZEN_GANG_MACHINES", "2.5"), ("MIZZEN_PLATFORM", "moon"),
        ("WORLD_SIZE", "9" * 400),
    ],
)  # fmt: skip
def test_a_wrong_variable_is_named(name: str, value: str) -> None:
    """For an invalid environment variable, the error has the name, the value and the valid values."""
    with pytest.raises(ValueError, match=f"^{name}='{value}': must be ") as caught:
        mtbf_of_environ({name: value})
    assert len(str(caught.value)) > len(f"{name}='{value}': must be ")


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("mtbf_s", (0, 1)), ("mtbf_s", (nan, 1)), ("mtbf_s", (inf, 1)), ("save_s", (1, -1)), ("save_s", (1, nan)),
        ("save_s", (1, inf)),
    ],
)  # fmt: skip
def test_a_number_out_of_its_range_is_named(field: str, arguments: tuple[float, float]) -> None:
    """A time that is not a valid number is an error that names the field."""
    with pytest.raises(ValueError, match=f"^{field}="):
        best_interval_s(*arguments)


@pytest.mark.parametrize(
    ("field", "step_s", "more"),
    [
        ("step_s", 0, {}), ("step_s", nan, {}), ("interval_s", 1, {"interval_s": -1}), ("write_s", 1, {"write_s": inf}),
    ],
)  # fmt: skip
def test_a_choice_names_what_is_wrong(field: str, step_s: float, more: dict[str, float]) -> None:
    """For an invalid argument of `choose`, the error has its name and its value."""
    with pytest.raises(ValueError, match=f"^{field}="):
        choose(mtbf(), 1, step_s, **more)


@pytest.mark.parametrize("more", [{"machines": 0}, {"platform": "moon"}, {"machine_hazard_per_h": nan}])
def test_a_source_names_what_is_wrong(more: dict[str, object]) -> None:
    """For an invalid argument of `mtbf`, the error has its name, its value and the valid values."""
    [(field, value)] = more.items()
    with pytest.raises(ValueError, match=f"^{field}={value!r}: must be"):
        mtbf(**more)  # type: ignore[arg-type]


def test_what_never_ends_says_so() -> None:
    """If a step is far longer than the MTBF, the overhead is infinite and the explanation says so."""
    choice = choose(mtbf(gang_mtbf_s=1), 1, 10_000)
    assert choice.steps == 1 and choice.overhead == inf
    assert "hardly ever end" in choice.sentences()[-1] and "every step is saved" in choice.sentences()[-2]


def test_it_needs_the_standard_library_only() -> None:
    """`mizzen.cadence` imports only the standard library, and no module that is slow to import."""
    script = f"""
import sys
sys.path.insert(0, {str(Path(mizzen.__file__).parents[1])!r})
before = set(sys.modules)
import mizzen.cadence
new = {{name.split(".")[0] for name in set(sys.modules) - before}}
assert new <= {{*sys.stdlib_module_names, "mizzen"}}, new
assert not new & {{"statistics", "decimal", "fractions", "asyncio"}}, new
"""
    command = [sys.executable, "-S", "-I", "-W", "error", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
