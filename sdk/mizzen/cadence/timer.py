"""The class `Cadence` measures the steps and saves of a run, and decides at which steps to save.

The cost of a save (C) is the time for which it stalls the training. A save that continues in the background, from a
snapshot in memory or from a local copy, becomes durable later. An interruption then loses more work, but this amount
does not depend on the interval, so it does not influence the choice. The write in the background has two other effects:
the interval is not shorter than the write, because the next save would wait for it; and steps are slower during the
write. The slowdown is measured and counted as a cost.

If the end of the machines is known, each interval divides the remaining time. The last save is planned to finish before
the end with a margin of half the time of a save, because saves vary and one that finishes after the end is lost.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from math import inf

from mizzen.cadence.choice import Choice, choose
from mizzen.cadence.formula import check_above_zero, check_not_negative, whole_steps
from mizzen.cadence.interruptions import Mtbf, ends_in_s_of_environ, mtbf_of_environ, number
from mizzen.cadence.interval_file import IntervalFile, SiteInterval

INTERVAL = "MIZZEN_CHECKPOINT_INTERVAL_S"
FIRST_SAVE_S = 10.0
"""The assumed cost of a save before the first one is measured."""
LOOK_S = 0.1
"""The clock is read about this often."""
LOOK_STEPS = 10
"""The clock is read after at most this many steps. So if steps suddenly take a minute each, at most these many pass
unnoticed."""

_SAVES = 5
_STEPS = 15
_ENOUGH = 5
_MOST_SLOWED = 1.0
_RETRY_PART = 0.1
_END_MARGIN = 1.5
"""The last save before a known end has time for this factor times the longest recent save, as after a notice."""


class Cadence:
    """Decides when to save, from measurements of this run.

    Estimates are medians: of the last 5 saves, and of the last 15 timings of steps. The first save is slow, because
    connections, buffers and caches do not exist yet; it counts only until there is another measurement. A single slow
    save or step (a busy store, an evaluation, a compilation) does not change a median, but a lasting change does after
    half of these measurements. A mean would follow a single outlier.

    A save is due when one more step of the median length would end after the interval. So the interval is rounded down
    to whole steps, and slower steps are noticed when the clock is read next. In a gang, one rank decides and the others
    follow it, because clocks differ.

    Thread safety: only the training thread may call `begin`, `should_save` and `saved`. Any thread may call the other
    methods. A signal handler must not call any method.
    """

    def __init__(
        self,
        mtbf: Mtbf,
        *,
        interval_s: float | None = None,
        save_s: float | None = None,
        ends_in_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        interval_file: IntervalFile | None = None,
    ) -> None:
        """Create a cadence. The first interval starts with `begin`, or else with the first `should_save`.

        Args:
            mtbf: mean time between interruptions of the gang.
            interval_s: a fixed interval, which takes precedence over the formula; 0: every step is saved.
            save_s: the cost of a save in an earlier attempt; None: 10 s is assumed until the first save.
            ends_in_s: seconds from now until the machines certainly end; None: not known.
            clock: returns monotonic seconds.
            interval_file: the file with the longest and the shortest interval that the coordinator of the site
                computes. They limit the interval of the formula; `interval_s` takes precedence over both.

        Raises:
            ValueError: a number is out of its range. The message names it.
        """
        self._mtbf = mtbf
        self._file = interval_file
        self._site: SiteInterval | None = None
        self._told_s = interval_s
        self._clock = clock
        self._ends_s = self._end(ends_in_s)
        self._lock = threading.Lock()
        self._held = deque([save_s] if save_s is not None else [], _SAVES)
        self._known = save_s is not None
        self._saves = 0
        self._writes: deque[float] = deque(maxlen=_SAVES)
        self._slowed: deque[float] = deque(maxlen=_SAVES)
        self._steps: deque[float] = deque(maxlen=_STEPS)
        self._beside: dict[bool, deque[float]] = {busy: deque(maxlen=4 * _STEPS) for busy in (False, True)}
        """Step times since the last write ended: without (False) and with (True) a write in the background."""
        self._step_s: float | None = None
        self._longest_s: float | None = None
        self._in_flight = 0
        """Number of writes in the background. It may be negative: `written` may be called before `saved`."""
        # `_base`: step at the start of the interval. `_seen`, `_look`: steps of the last and the next clock reading.
        self._base = self._seen = self._look = -1
        self._base_s = self._seen_s = 0.0
        self._reread()
        self._interval_s = self._choice().interval_s

    def _end(self, ends_in_s: float | None) -> float | None:
        """Return the known end as a time of the clock."""
        if ends_in_s is None:
            return None
        check_above_zero(ends_in_s=ends_in_s)
        return self._clock() + ends_in_s

    @classmethod
    def from_environ(
        cls,
        environ: Mapping[str, str] | None = None,
        *,
        interval_s: float | None = None,
        platform: str | None = None,
        save_s: float | None = None,
        ends_in_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> "Cadence":
        """Create a cadence from environment variables: those of `interruptions` and `interval_file`, and
        `MIZZEN_CHECKPOINT_INTERVAL_S`.

        Args:
            environ: the variables; None: `os.environ`.
            interval_s: takes precedence over the variable.
            platform: the detected platform, for its prior.
            save_s: as for `Cadence`.
            ends_in_s: as for `Cadence`; takes precedence over the variables.
            clock: returns monotonic seconds.

        Raises:
            ValueError: a variable is invalid. The message names it.
        """
        given = os.environ if environ is None else environ
        told_s = number(given, INTERVAL, float, lambda n: n >= 0, "0 or more seconds")
        set_s = told_s if interval_s is None else interval_s
        found = mtbf_of_environ(given, platform=platform)
        known_s = ends_in_s_of_environ(given, time.time())
        end_s = known_s if ends_in_s is None else ends_in_s
        file = IntervalFile.from_environ(given, clock)
        return cls(found, interval_s=set_s, save_s=save_s, ends_in_s=end_s, clock=clock, interval_file=file)

    def should_save(self, step: int) -> bool:
        """Return whether a save is due now, after `step`.

        It remains due until `saved` is called. The result is False while a save is being written in the background.
        """
        if self._seen < step < self._look:
            return False
        return self._at(step)

    def begin(self, step: int) -> None:
        """Start an interval at `step`, at which no save is needed. Call this at the start and after each load."""
        with self._lock:
            self._restart(step, self._clock())

    def saved(self, step: int, held_s: float, *, writing: bool = False) -> None:
        """Record that `step` was saved and that the training continues now.

        After each save with `writing`, `written` or `failed` must be called. Until then no other save is due.

        Args:
            step: the step.
            held_s: seconds for which the training was stalled, without the wait for an earlier save.
            writing: whether the save is still being written in the background, and so is not durable yet.

        Raises:
            ValueError: `held_s` is out of its range.
        """
        check_not_negative(held_s=held_s)
        with self._lock:
            self._saves += 1
            if self._saves == 2 and not self._known:
                self._held.clear()
            if self._saves > 1 or not self._known:
                self._held.append(held_s)
            self._in_flight += writing
            self._restart(step, self._clock())

    def written(self, write_s: float) -> None:
        """Record that the save in the background is durable, `write_s` seconds after its write began.

        Raises:
            ValueError: `write_s` is out of its range.
        """
        check_not_negative(write_s=write_s)
        with self._lock:
            self._in_flight -= 1
            self._writes.append(write_s)
            free, busy = self._beside[False], self._beside[True]
            if len(free) >= _ENOUGH and len(busy) >= _ENOUGH:
                self._slowed.append(min(_MOST_SLOWED, max(0.0, _median(busy) / _median(free) - 1)))
            free.clear()
            busy.clear()
            self._look = self._seen
            self._interval_s = self._planned_s()

    def failed(self) -> None:
        """Record that the write in the background failed. A save is due again after a tenth of the interval."""
        with self._lock:
            self._in_flight -= 1
            self._again()

    def missed(self, at_most_s: float = inf) -> None:
        """Record that a save failed before `saved`.

        A save is due again after a tenth of the interval, or after `at_most_s` seconds if that is sooner.
        """
        with self._lock:
            self._again(at_most_s)

    def update(
        self, *, mtbf: Mtbf | None = None, interval_s: float | None = None, ends_in_s: float | None = None
    ) -> None:
        """Set a new mean time between interruptions, a new fixed interval, or the seconds until the machines end.

        A value that is None is not changed.

        Raises:
            ValueError: a number is out of its range. No value is changed then.
        """
        with self._lock:
            told_s = self._told_s if interval_s is None else interval_s
            choose(mtbf or self._mtbf, 0.0, None, interval_s=told_s)
            self._ends_s = self._ends_s if ends_in_s is None else self._end(ends_in_s)
            self._mtbf, self._told_s = mtbf or self._mtbf, told_s
            self._look = self._seen
            self._interval_s = self._planned_s()

    def explain(self) -> Choice:
        """Return the current choice with its reasons."""
        with self._lock:
            return self._choice()

    @property
    def longest_step_s(self) -> float | None:
        """The longest step of this run so far in seconds, or more: the longest time between two readings of the clock.

        It includes what the training did between two steps, such as an evaluation. The first step does not count,
        because it may include a compilation. None: not measured yet.
        """
        with self._lock:
            return self._longest_s

    def _at(self, step: int) -> bool:
        """Read the clock, measure the steps since the last reading, and decide whether a save is due."""
        with self._lock:
            now_s = self._clock()
            if self._base < 0 or step < self._seen:
                self._restart(step, now_s)
                return False
            if self._reread():
                self._interval_s = self._planned_s()
            if step > self._seen:
                if self._step_s is not None:
                    self._longest_s = max(self._longest_s or 0.0, now_s - self._seen_s)
                self._measure((now_s - self._seen_s) / (step - self._seen))
                self._seen, self._seen_s = step, now_s
            step_s = self._step_s
            if step == self._base or step_s is None:
                self._look = step + 1
                return False
            left = self._left(now_s)
            if left == 0 and self._in_flight <= 0:
                self._look = step
                return True
            gap = LOOK_STEPS if step_s * LOOK_STEPS <= LOOK_S else max(1, int(LOOK_S / step_s))
            self._look = step + min(gap, left or gap)
            return False

    def _left(self, now_s: float) -> int:
        """Return the whole steps until the interval ends."""
        left_s = self._interval_s - (now_s - self._base_s)
        if self._step_s is None:
            return 1
        return whole_steps(left_s, self._step_s) if left_s >= self._step_s else 0

    def _measure(self, step_s: float) -> None:
        # A difference of 0 means that the step is shorter than the resolution of the clock.
        step_s = max(step_s, 1e-9)
        self._steps.append(step_s)
        self._beside[self._in_flight > 0].append(step_s)
        self._step_s = _median(self._steps)

    def _again(self, at_most_s: float = inf) -> None:
        self._base_s = self._clock() - self._interval_s + min(_RETRY_PART * self._interval_s, at_most_s)
        self._look = self._seen

    def _restart(self, step: int, now_s: float) -> None:
        self._base = self._seen = step
        self._base_s = self._seen_s = now_s
        self._look = step + 1
        self._reread()
        self._interval_s = self._planned_s()

    def _reread(self) -> bool:
        """Read the coordinator's interval, and return whether it has changed."""
        before = self._site
        self._site = None if self._file is None else self._file.current()
        return self._site != before

    def _planned_s(self) -> float:
        """Return the interval, counted from the start of the current one."""
        choice = self._choice()
        # A fixed interval is not moved, nor one that ends with the machines.
        is_free = choice.rule not in ("told", "end")
        if is_free and self._base >= 0 and self._site is not None and self._file is not None:
            return self._file.staggered_s(self._site, choice.interval_s, self._clock() - self._base_s)
        return choice.interval_s

    def _choice(self) -> Choice:
        write_s = _median(self._writes) if self._writes else 0.0
        slowed = _median(self._slowed) if self._slowed else 0.0
        held_s = _median(self._held) if self._held else FIRST_SAVE_S
        why = "assumed until one was measured" if not self._held else f"the median of the last {len(self._held)}"
        if self._known and self._saves <= 1:
            why = "as in an earlier attempt"
        if slowed:
            why += f", and steps are {slowed:.0%} slower while it is written"
        cost_s = held_s + slowed * write_s
        ends_in_s = self._ends_in_s(cost_s + write_s)

        def chosen(mtbf: Mtbf, site_interval_s: float | None = None) -> Choice:
            return choose(
                mtbf, cost_s, self._step_s, interval_s=self._told_s, write_s=write_s, save_why=why,
                ends_in_s=ends_in_s, site_interval_s=site_interval_s,
            )  # fmt: skip

        own, site = chosen(self._mtbf), self._site
        if site is None or own.rule == "told" or site.clipped_s(own.interval_s) == own.interval_s:
            return own
        mtbf = self._mtbf
        if site.hazard_per_h:
            mtbf = Mtbf(3600 / site.hazard_per_h, "scheduler", "as the coordinator of the site estimates")
        return chosen(mtbf, site.clipped_s(own.interval_s))

    def _ends_in_s(self, durable_s: float) -> float | None:
        """Return the time from the start of the interval until the last save must be durable.

        None: no end is known, or too little time is left.

        Args:
            durable_s: how long a save usually takes until it is durable.
        """
        if self._ends_s is None:
            return None
        left_s = self._ends_s - (self._clock() if self._base < 0 else self._base_s)
        if self._held:
            longest_s = max(self._held) + max(self._writes, default=0.0)
            left_s -= _END_MARGIN * longest_s - durable_s
        else:
            # The time of the first save is not known, so it is not planned right before the end.
            left_s /= 2
        return left_s if left_s > 0 else None


def _median(values: Iterable[float]) -> float:
    """Return the median. The module `statistics` is not used because its import is slower than this package's."""
    found = sorted(values)
    return (found[(len(found) - 1) // 2] + found[len(found) // 2]) / 2
