"""`Cadence`: measures a run's steps and saves, and says at which step to save.

What a save costs (C) is the time that it holds the training up. A save that is written on in the background, from a
snapshot in memory or from a local copy, is durable later: an interruption then loses that much more, but the same
whatever the interval is, so it has no part in the choice. It does set the shortest interval, as the next save would
wait for it; and while it goes on the steps are slower, which is a cost and is measured.

Where the end of the machines is known, each interval divides what is then left. The last save is planned to end before
the end, by half of what a save takes: some saves take longer than others, and one that ends after the end is lost.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from math import inf

from mizzen.cadence.choice import Choice, choose
from mizzen.cadence.formula import whole_steps
from mizzen.cadence.interruptions import Mtbf, ends_in_s_of_environ, mtbf_of_environ, number

INTERVAL = "MIZZEN_CHECKPOINT_INTERVAL_S"
FIRST_SAVE_S = 10.0
"""What a save is taken to cost before the first one."""
LOOK_S = 0.1
"""The clock is looked at about this often."""
LOOK_STEPS = 10
"""... but never after more steps than these: so many may go unnoticed when they suddenly take a minute each."""

_SAVES = 5
_STEPS = 15
_ENOUGH = 5
_MOST_SLOWED = 1.0
_RETRY_PART = 0.1
_END_MARGIN = 1.5
"""The last save before a known end may take so many times the longest of those before. As for a notice."""


class Cadence:
    """Says when to save, from measurements of this run.

    Estimates are medians of the last few: of 5 saves, and of 15 timings of steps. The first save is slow, as
    connections, buffers and caches are not there yet; it counts only until there is another figure. One slow save or
    step (a busy store, an evaluation, a compilation) does not move a median, and a lasting change does after half of so
    many. A mean would follow the one.

    A save is due when one step more, as long as steps are, would end after the interval by the clock: that is the
    interval in whole steps, rounded down, and steps that become slower are noticed at the next look at the clock. In a
    gang one rank asks and the others follow it: clocks differ.

    The training thread calls `begin`, `should_save` and `saved`; any thread the others; a signal handler none.
    """

    def __init__(
        self,
        mtbf: Mtbf,
        *,
        interval_s: float | None = None,
        save_s: float | None = None,
        ends_in_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """A cadence that starts with `begin`, or else when it is first asked.

        Args:
            mtbf: mean time between interruptions of the gang.
            interval_s: an interval that was set outright; wins over the formula. With 0 every step is saved.
            save_s: what a save cost in an earlier attempt, if that is known; else 10 s until the first one.
            ends_in_s: in how many seconds from now the machines go for certain; None: not known.
            clock: monotonic seconds.

        Raises:
            ValueError: a number is out of its range; the message names it.
        """
        self._mtbf = mtbf
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
        """Step times while nothing was written, and while something was, since the last write."""
        self._step_s: float | None = None
        self._in_flight = 0
        """Writes in the background; one may end before it is told that it began."""
        # The base is where the interval starts; seen and look are the steps of the last and the next look at the clock.
        self._base = self._seen = self._look = -1
        self._base_s = self._seen_s = 0.0
        self._interval_s = self._choice().interval_s

    def _end(self, ends_in_s: float | None) -> float | None:
        """The known end, by the clock."""
        if ends_in_s is None:
            return None
        if not 0 < ends_in_s < inf:
            raise ValueError(f"ends_in_s={ends_in_s}: must be more than 0 seconds")
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
        """The cadence by the environment's variables (`interruptions`, and `MIZZEN_CHECKPOINT_INTERVAL_S`).

        Args:
            environ: defaults to `os.environ`.
            interval_s: wins over the variable.
            platform: what was detected, for the prior.
            save_s: as for `Cadence`.
            ends_in_s: as for `Cadence`; wins over the variables.
            clock: monotonic seconds.

        Raises:
            ValueError: a variable is wrong; the message names it.
        """
        given = os.environ if environ is None else environ
        told_s = number(given, INTERVAL, float, lambda n: n >= 0, "0 or more seconds")
        set_s = told_s if interval_s is None else interval_s
        found = mtbf_of_environ(given, platform=platform)
        known_s = ends_in_s_of_environ(given, time.time())
        end_s = known_s if ends_in_s is None else ends_in_s
        return cls(found, interval_s=set_s, save_s=save_s, ends_in_s=end_s, clock=clock)

    def should_save(self, step: int) -> bool:
        """Whether to save now, after `step`. Stays so until `saved`; False while a save is still being written."""
        if self._seen < step < self._look:
            return False
        return self._at(step)

    def begin(self, step: int) -> None:
        """The training starts or goes on from `step`, which needs no save. Call it after every load."""
        with self._lock:
            self._restart(step, self._clock())

    def saved(self, step: int, held_s: float, *, writing: bool = False) -> None:
        """`step` was saved and the training goes on now. With `writing` it is not durable before `written`.

        Every save that is `writing` must be followed by `written` or `failed`, or no other would ever be due.

        Args:
            step: the step.
            held_s: seconds that the training was held up, without a wait for an earlier save.
            writing: whether it is still written in the background.

        Raises:
            ValueError: `held_s` is out of its range.
        """
        if not 0 <= held_s < inf:
            raise ValueError(f"held_s={held_s}: must be 0 or more seconds")
        with self._lock:
            self._saves += 1
            if self._saves == 2 and not self._known:
                self._held.clear()
            if self._saves > 1 or not self._known:
                self._held.append(held_s)
            self._in_flight += writing
            self._restart(step, self._clock())

    def written(self, write_s: float) -> None:
        """The save that was written in the background is durable, after `write_s` of it.

        Raises:
            ValueError: `write_s` is out of its range.
        """
        if not 0 <= write_s < inf:
            raise ValueError(f"write_s={write_s}: must be 0 or more seconds")
        with self._lock:
            self._in_flight -= 1
            self._writes.append(write_s)
            free, busy = self._beside[False], self._beside[True]
            if len(free) >= _ENOUGH and len(busy) >= _ENOUGH:
                self._slowed.append(min(_MOST_SLOWED, max(0.0, _median(busy) / _median(free) - 1)))
            free.clear()
            busy.clear()
            self._look = self._seen
            self._interval_s = self._choice().interval_s

    def failed(self) -> None:
        """The write in the background failed: the save is tried again after a tenth of the interval."""
        with self._lock:
            self._in_flight -= 1
            self._again()

    def missed(self) -> None:
        """A save failed before it was told as `saved`: it is tried again after a tenth of the interval."""
        with self._lock:
            self._again()

    def tell(
        self, *, mtbf: Mtbf | None = None, interval_s: float | None = None, ends_in_s: float | None = None
    ) -> None:
        """It is known better now: a new mean time, a new interval, or in how many seconds the machines go.

        What is not given stays.

        Raises:
            ValueError: a number is out of its range; nothing has changed.
        """
        with self._lock:
            told_s = self._told_s if interval_s is None else interval_s
            choose(mtbf or self._mtbf, 0.0, None, interval_s=told_s)
            self._ends_s = self._ends_s if ends_in_s is None else self._end(ends_in_s)
            self._mtbf, self._told_s = mtbf or self._mtbf, told_s
            self._look = self._seen
            self._interval_s = self._choice().interval_s

    def explain(self) -> Choice:
        """The choice as it is now."""
        with self._lock:
            return self._choice()

    @property
    def next_step(self) -> int:
        """The step after which it would save, if steps stay as they are."""
        with self._lock:
            return self._seen + self._left(self._seen_s)

    def _at(self, step: int) -> bool:
        """Look at the clock: take the time of the steps since the last look, and decide."""
        with self._lock:
            now_s = self._clock()
            if self._base < 0 or step < self._seen:
                self._restart(step, now_s)
                return False
            if step > self._seen:
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
        """Whole steps until the interval ends."""
        left_s = self._interval_s - (now_s - self._base_s)
        if self._step_s is None:
            return 1
        return whole_steps(left_s, self._step_s) if left_s >= self._step_s else 0

    def _measure(self, step_s: float) -> None:
        # A clock that has not moved: shorter than it can tell.
        step_s = max(step_s, 1e-9)
        self._steps.append(step_s)
        self._beside[self._in_flight > 0].append(step_s)
        self._step_s = _median(self._steps)

    def _again(self) -> None:
        self._base_s = self._clock() - (1 - _RETRY_PART) * self._interval_s
        self._look = self._seen

    def _restart(self, step: int, now_s: float) -> None:
        self._base = self._seen = step
        self._base_s = self._seen_s = now_s
        self._look = step + 1
        self._interval_s = self._choice().interval_s

    def _choice(self) -> Choice:
        write_s = _median(self._writes) if self._writes else 0.0
        slowed = _median(self._slowed) if self._slowed else 0.0
        held_s = _median(self._held) if self._held else FIRST_SAVE_S
        why = "until one was measured" if not self._held else f"the median of the last {len(self._held)}"
        if self._known and self._saves <= 1:
            why = "as in an earlier attempt"
        if slowed:
            why += f", and steps are {slowed:.0%} slower while it is written"
        cost_s = held_s + slowed * write_s
        return choose(
            self._mtbf,
            cost_s,
            self._step_s,
            interval_s=self._told_s,
            write_s=write_s,
            save_why=why,
            ends_in_s=self._ends_in_s(cost_s + write_s),
        )

    def _ends_in_s(self, durable_s: float) -> float | None:
        """From the start of the interval to when the last save is to be durable; None: no end is known, or it is near.

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
            # Nobody knows what the first save takes: it must not be the last thing before the end.
            left_s /= 2
        return left_s if left_s > 0 else None


def _median(values: Iterable[float]) -> float:
    """Middle of the values. The module `statistics` takes longer to import than all of this."""
    found = sorted(values)
    return (found[(len(found) - 1) // 2] + found[len(found) // 2]) / 2
