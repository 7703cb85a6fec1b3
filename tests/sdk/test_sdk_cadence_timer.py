"""When the cadence of a run requests a save, what it measures, and how it adapts. The tests use a fake clock."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from math import inf, nan
from threading import Thread

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mizzen.cadence import Cadence, mtbf
from mizzen.cadence.timer import FIRST_SAVE_S, LOOK_STEPS

HOURLY = mtbf(gang_mtbf_s=3600)


@dataclass
class Run:
    """A simulated training with its own clock, whose saves block it."""

    cadence: Cadence = field(init=False)
    now_s: float = 1000.0
    step: int = 0
    looks: int = 0
    saves: list[tuple[int, float]] = field(default_factory=list)
    """Step and time of each save."""

    def clock(self) -> float:
        self.looks += 1
        return self.now_s

    def go(self, steps: int, step_s: float | Callable[[int], float], save_s: float = 1.0, most: int = 10**9) -> None:
        """Runs `steps` steps, or until `most` saves were made."""
        last = len(self.saves) + most
        for _ in range(steps):
            self.now_s += step_s(self.step + 1) if callable(step_s) else step_s
            self.step += 1
            if self.cadence.should_save(self.step):
                self.saves.append((self.step, self.now_s))
                self.now_s += save_s
                self.cadence.saved(self.step, save_s)
                if len(self.saves) == last:
                    return


def start(**arguments: object) -> Run:
    run = Run()
    run.cadence = Cadence(arguments.pop("mtbf", HOURLY), clock=run.clock, **arguments)  # type: ignore[arg-type]
    run.cadence.begin(0)
    return run


def test_steady_steps_are_saved_every_so_many() -> None:
    """With steps of 2 s, saves of 30 s and an MTBF of 3 h, saves are 402 steps apart."""
    run = start(mtbf=mtbf(gang_mtbf_s=10_800), save_s=30.0)
    run.go(3000, 2.0, save_s=30.0)
    assert [b - a for (a, _), (b, _) in pairwise(run.saves)] == [402] * (len(run.saves) - 1)
    assert run.saves[0][0] == 402 and len(run.saves) == 7
    choice = run.cadence.explain()
    assert (choice.steps, choice.save_s, choice.step_s) == (402, 30.0, 2.0)


@given(st.floats(1e-4, 100), st.floats(0.001, 50), st.floats(100, 1e6))
def test_never_above_the_interval(step_s: float, save_s: float, mtbf_s: float) -> None:
    """The time between two saves is at most the interval, or one step if a step is longer."""
    run = start(mtbf=mtbf(gang_mtbf_s=mtbf_s), save_s=save_s)
    run.go(2000, step_s, save_s)
    longest_s = max(step_s, run.cadence.explain().interval_s) * (1 + 1e-6)
    for (_, before_s), (_, after_s) in pairwise(run.saves):
        assert after_s - (before_s + save_s) <= longest_s


def test_before_the_first_save_a_cost_is_assumed() -> None:
    """Before the first save, its cost is assumed to be 10 s, or the given cost in an earlier attempt."""
    assert start().cadence.explain().save_s == FIRST_SAVE_S
    assert start(save_s=3.0).cadence.explain().save_s == 3.0
    assert "earlier attempt" in start(save_s=3.0).cadence.explain().sentences()[1]


def test_the_first_save_is_left_out() -> None:
    """The cost of the first save is dropped when the second one is measured."""
    run = start()
    run.go(10**6, 1.0, save_s=20.0, most=1)
    assert run.cadence.explain().save_s == 20.0
    run.go(10**6, 1.0, save_s=1.0, most=1)
    assert run.cadence.explain().save_s == 1.0


def test_an_earlier_attempts_save_outlives_the_first_one() -> None:
    """The cost from an earlier attempt is used until the second save; then it is one value of the median."""
    run = start(save_s=2.0)
    run.go(10**6, 1.0, save_s=20.0, most=1)
    assert run.cadence.explain().save_s == 2.0 and "earlier attempt" in run.cadence.explain().save_why
    run.go(10**6, 1.0, save_s=4.0, most=1)
    assert run.cadence.explain().save_s == 3.0 and "median of the last 2" in run.cadence.explain().save_why


def test_one_slow_save_does_not_count_and_a_lasting_change_does() -> None:
    """The cost is the median of the last five saves: one slow save does not change it, three slow saves do."""
    run = start()
    run.go(10**6, 1.0, save_s=1.0, most=6)
    run.go(10**6, 1.0, save_s=60.0, most=1)
    assert run.cadence.explain().save_s == 1.0
    run.go(10**6, 1.0, save_s=60.0, most=2)
    assert run.cadence.explain().save_s == 60.0
    assert run.cadence.explain().interval_s > 600
    run.go(10**6, 1.0, save_s=60.0, most=1)
    assert run.saves[-1][0] - run.saves[-2][0] == run.cadence.explain().steps > 600


def test_one_slow_step_does_not_count_and_slower_steps_do() -> None:
    """An evaluation of 50 s every tenth step does not change the step time; a lasting change of the steps does."""
    run = start(interval_s=1000.0)
    run.go(200, lambda step: 50.0 if step % 10 == 0 else 1.0)
    assert run.cadence.explain().step_s == pytest.approx(1.0)
    run.go(20, 4.0)
    assert run.cadence.explain().step_s == pytest.approx(4.0) and run.cadence.explain().steps == 250
    run.go(300, 0.5)
    assert run.cadence.explain().step_s == pytest.approx(0.5) and run.cadence.explain().steps == 2000


def test_a_lasting_change_of_steps_takes_eight_of_them() -> None:
    """The step time is the median of fifteen timings: it changes at the eighth slower step."""
    run = start(interval_s=1000.0)
    run.go(30, 1.0)
    run.go(7, 4.0)
    assert run.cadence.explain().step_s == 1.0
    run.go(1, 4.0)
    assert run.cadence.explain().step_s == 4.0


def test_one_step_more_must_end_within_the_interval() -> None:
    """With steps of 1 s and an interval of 100 s, a save is due after 99.5 s but not after 99 s."""
    for took_s, due in ((49.5, True), (49.0, False)):
        run = start(interval_s=100.0)
        run.go(50, 1.0)
        run.now_s += took_s
        assert run.cadence.should_save(51) == due


def test_evaluations_count_as_time_at_risk() -> None:
    """The time of evaluations between steps counts towards the interval of 1000 s."""
    run = start(interval_s=1000.0)
    run.go(3000, lambda step: 50.0 if step % 10 == 0 else 1.0)
    gaps_s = [after_s - before_s - 1.0 for (_, before_s), (_, after_s) in pairwise(run.saves)]
    assert len(gaps_s) > 5 and max(gaps_s) <= 1050 and min(gaps_s) > 900


@pytest.mark.parametrize(("step_s", "late"), [(10.0, 0), (0.1, 0), (0.05, 2), (0.001, LOOK_STEPS)])
def test_steps_that_suddenly_take_a_minute_are_noticed(step_s: float, late: int) -> None:
    """The clock is read at least every ten steps, so a save is at most ten steps late if steps become slow."""
    run = start(interval_s=600.0)
    run.go(200, step_s)
    began_s = run.now_s
    run.go(100, 60.0, most=1)
    assert run.saves, "no save was made"
    assert run.saves[0][1] - began_s <= 600 + 60 * late


def test_the_clock_is_looked_at_every_so_often() -> None:
    """With steps of 1 ms the clock is read at every tenth step."""
    run = start(interval_s=600.0)
    run.go(100, 0.001)
    before = run.looks
    run.go(10_000, 0.001)
    assert run.looks - before == 10_000 / LOOK_STEPS


def test_it_stays_due_until_it_is_saved() -> None:
    """A save remains due at each step until it is made, and is not due again at the same step."""
    run = start(interval_s=10.0)
    run.now_s += 11
    assert not run.cadence.should_save(0)
    assert run.cadence.should_save(1) and run.cadence.should_save(1) and run.cadence.should_save(2)
    run.cadence.saved(2, 0.5)
    assert not run.cadence.should_save(2) and not run.cadence.should_save(3)
    run.cadence.update(interval_s=0.0)
    run.now_s += 1
    assert run.cadence.should_save(4)
    run.cadence.saved(4, 0.5)
    assert not run.cadence.should_save(4)


def test_a_save_of_another_reason_starts_the_interval_anew() -> None:
    """After a save that was not due, as on a notice or at the end of an epoch, a full interval begins."""
    run = start(interval_s=100.0)
    run.go(70, 1.0)
    assert run.saves == []
    run.cadence.saved(70, 1.0)
    run.go(99, 1.0)
    assert run.saves == []
    run.go(1, 1.0)
    assert [step for step, _ in run.saves] == [170]


def test_going_back_to_an_earlier_step_starts_anew() -> None:
    """After a training goes back to an earlier step, with or without `begin`, a full interval begins there."""
    run = start(interval_s=100.0)
    run.go(250, 1.0)
    run.step = 20
    run.go(101, 1.0)
    assert run.saves[-1][0] == 121
    run.cadence.begin(50)
    run.step = 50
    run.go(100, 1.0)
    assert run.saves[-1][0] == 150


def test_it_begins_when_it_is_first_asked() -> None:
    """Without `begin` the interval starts at the first `should_save`, which returns False."""
    now_s = 5.0
    cadence = Cadence(HOURLY, interval_s=0.0, clock=lambda: now_s)
    assert not cadence.should_save(7)
    now_s = 6.0
    assert cadence.should_save(8)


def test_a_save_in_the_background_is_waited_for() -> None:
    """No save is due during a background write; afterwards the interval is at least as long as the write."""
    run = start(interval_s=None, save_s=0.01)
    run.go(20, 1.0, save_s=0.0, most=1)
    run.cadence.saved(run.step, 0.01, writing=True)
    for _ in range(200):
        run.now_s += 1
        run.step += 1
        assert not run.cadence.should_save(run.step)
    run.cadence.written(200.0)
    run.now_s += 1
    run.step += 1
    assert run.cadence.should_save(run.step)
    choice = run.cadence.explain()
    assert (choice.rule, choice.interval_s) == ("write", 200.0)


def behind(run: Run, times: int, free_s: float, busy_s: float, write_steps: int = 20, held_s: float = 0.5) -> None:
    """Makes `times` saves with background writes; steps take `busy_s` during a write and `free_s` otherwise."""
    for _ in range(times):
        run.go(20, free_s, most=1)
        run.cadence.saved(run.step, held_s, writing=True)
        for _ in range(write_steps):
            run.now_s += busy_s
            run.step += 1
            assert not run.cadence.should_save(run.step)
        run.cadence.written(write_steps * busy_s)


def test_slower_steps_beside_a_write_are_part_of_its_cost() -> None:
    """If a write of 24 s slows steps by 20%, the cost of the save is its stall of 0.5 s plus 20% of 24 s."""
    run = start(interval_s=10_000.0, save_s=0.5)
    behind(run, 4, 1.0, 1.2)
    choice = run.cadence.explain()
    assert choice.save_s == pytest.approx(0.5 + 0.2 * 24) and "20% slower" in choice.save_why


def test_steps_as_fast_as_before_cost_nothing() -> None:
    """If steps are not slower during a write, the cost of the save is only its stall."""
    for busy_s in (1.0, 0.8):
        run = start(interval_s=10_000.0, save_s=0.5)
        behind(run, 4, 1.0, busy_s)
        assert run.cadence.explain().save_s == 0.5


def test_steps_that_change_for_good_are_no_cost_of_a_write() -> None:
    """Steps during a write are compared only with the steps just before it, so a lasting change is not a cost."""
    for before_s, after_s in ((1.0, 2.0), (2.0, 1.0)):
        run = start(interval_s=10_000.0, save_s=0.5)
        behind(run, 1, before_s, before_s)
        behind(run, 1, after_s, after_s)
        assert run.cadence.explain().save_s == 0.5


def test_the_end_of_a_write_is_noticed_at_the_next_step() -> None:
    """An overdue save is due at the first step after the previous write ends, without waiting for a clock reading."""
    run = start(interval_s=0.05)
    run.go(20, 0.001)
    run.cadence.saved(20, 0.0, writing=True)
    run.go(213, 0.001)
    assert run.saves == []
    run.cadence.written(0.01)
    run.go(1, 0.001)
    assert [step for step, _ in run.saves] == [234]


def test_a_write_may_end_before_it_is_told_that_it_began() -> None:
    """If `written` is called before `saved`, as another thread may do, later saves are not blocked."""
    run = start(interval_s=10.0)
    run.cadence.written(0.1)
    run.cadence.saved(0, 0.1, writing=True)
    run.go(10, 1.0)
    assert [step for step, _ in run.saves] == [10]


def test_a_failed_write_is_tried_again_soon() -> None:
    """After a failed write, a save is due after a tenth of the interval."""
    run = start(interval_s=100.0)
    run.go(100, 1.0, most=1)
    run.cadence.saved(100, 0.1, writing=True)
    run.go(30, 1.0)
    run.cadence.failed()
    run.go(1000, 1.0, most=1)
    assert run.saves[-1][0] == 140


def test_the_scheduler_may_know_better_later() -> None:
    """A new MTBF takes effect immediately, a fixed interval takes precedence, and invalid values change nothing."""
    run = start(save_s=10.0)
    run.go(100, 1.0)
    before = run.cadence.explain()
    run.cadence.update(mtbf=mtbf(gang_mtbf_s=3600 * 4))
    assert run.cadence.explain().interval_s == pytest.approx(2 * before.interval_s)
    run.cadence.update(interval_s=120.0)
    assert run.cadence.explain().interval_s == 120.0
    with pytest.raises(ValueError, match="interval_s"):
        run.cadence.update(interval_s=-1.0)
    assert run.cadence.explain().interval_s == 120.0
    run.go(1000, 1.0, most=1)
    assert run.saves[-1][0] == 120


@pytest.mark.parametrize("wrong", [-1.0, nan, inf])
def test_wrong_times_are_refused(wrong: float) -> None:
    """An invalid time is an error that names the field, and does not change the estimates."""
    run = start(save_s=2.0)
    with pytest.raises(ValueError, match="held_s="):
        run.cadence.saved(1, wrong)
    with pytest.raises(ValueError, match="write_s="):
        run.cadence.written(wrong)
    assert run.cadence.explain().save_s == 2.0


def test_the_environment_sets_it() -> None:
    """The scheduler's interval is used unless the program passes one; an invalid one is an error that names it."""
    environ = {"MIZZEN_CHECKPOINT_INTERVAL_S": "45", "MIZZEN_GANG_MTBF_S": "600"}
    told = Cadence.from_environ(environ).explain()
    assert (told.interval_s, told.rule, told.mtbf.source) == (45.0, "told", "scheduler")
    assert Cadence.from_environ(environ, interval_s=5.0).explain().interval_s == 5.0
    by_formula = Cadence.from_environ({"MIZZEN_GANG_MTBF_S": "800"}, save_s=1.0).explain()
    assert (by_formula.interval_s, by_formula.rule) == (40.0, "young")
    assert Cadence.from_environ({}, platform="spot").explain().mtbf.mtbf_s == 24 * 3600
    with pytest.raises(ValueError, match="MIZZEN_CHECKPOINT_INTERVAL_S='-1': must be 0 or more seconds"):
        Cadence.from_environ({"MIZZEN_CHECKPOINT_INTERVAL_S": "-1"})


def test_a_clock_that_stands_still_does_no_harm() -> None:
    """If the clock does not advance during the steps, no save is due until it has advanced."""
    run = start(interval_s=10.0)
    run.go(1000, 0.0)
    assert run.saves == []
    run.now_s += 11
    run.go(LOOK_STEPS, 0.0)
    assert len(run.saves) == 1


def test_writes_may_end_in_another_thread() -> None:
    """After a thousand saves whose writes end in other threads, the count of writes in flight is 0."""
    run = start(interval_s=0.0)
    threads = []
    for step in range(1, 1001):
        run.now_s += 1
        run.cadence.saved(step, 0.1, writing=True)
        threads.append(Thread(target=run.cadence.written, args=(0.1,)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    run.now_s += 1
    assert run.cadence.should_save(1001)


def test_a_save_that_never_began_is_no_measurement() -> None:
    """`missed` reports a failed save: a save is due after a tenth of the interval, and the cost is unchanged."""
    run = start(interval_s=100.0, save_s=2.0)
    run.go(50, 1.0)
    for _ in range(5):
        run.cadence.missed()
    assert run.cadence.explain().save_s == 2.0
    run.go(30, 1.0, most=1)
    assert [step for step, _ in run.saves] == [60]
