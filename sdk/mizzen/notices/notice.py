"""`Notice`, the decision whether to start a last save, and `Watcher`, the base class of all platforms' watchers."""

import math
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar, NamedTuple

MAX_WORDS = 500
"""The platform's message is truncated to this many characters."""

DEFAULT_LEAD_S = 120.0

DEFAULT_MARGIN = 1.5
"""A save is started only if at least one and a half times its measured duration is left."""


class Kind(StrEnum):
    """The reason of a notice."""

    PREEMPT = "preempt"
    """The platform reclaims the machine."""
    REBALANCE = "rebalance"
    """The platform may reclaim the machine soon, and recommends moving elsewhere."""
    WALLTIME = "walltime"
    """The job's time limit is near."""
    AGE_LIMIT = "age-limit"
    """The machine reaches the maximum age that its platform allows."""
    STOP = "stop"
    """A signal to stop, of unknown origin."""


@dataclass(frozen=True)
class Notice:
    """A notice that this process or its machine will be stopped."""

    platform: str
    kind: Kind
    seen_at_s: float
    """When this process received the notice, in seconds since the epoch."""
    ends_at_s: float | None
    """When the process is killed or the machine is stopped, in seconds since the epoch; None if unknown."""
    certain: bool
    """Whether the end is certain; False for a recommendation."""
    words: str
    """The platform's message, at most 500 characters."""

    def left_s(self, now_s: float) -> float | None:
        """Return the seconds from `now_s` (epoch) until the end, 0 or more; None if the end is unknown."""
        return None if self.ends_at_s is None else max(0.0, self.ends_at_s - now_s)

    def supersedes(self, other: "Notice | None") -> bool:
        """Return whether this notice is more urgent than `other`: certain before recommended, then the earlier end."""
        if other is None:
            return True
        if self.certain != other.certain:
            return self.certain
        if not self.certain or self.ends_at_s is None:
            return False
        return other.ends_at_s is None or self.ends_at_s < other.ends_at_s


class Window(NamedTuple):
    """The time from a platform's notice until it stops the machine or process, and where the figure comes from."""

    seconds: float
    source: str

    def or_told(self, environ: Mapping[str, str]) -> "Window":
        """Return the window from `MIZZEN_NOTICE_WINDOW_S` if it is set, else this window.

        Raises:
            ValueError: the variable is not a number of 0 or more.
        """
        return self.of_variable(environ, "MIZZEN_NOTICE_WINDOW_S") or self

    @classmethod
    def of_variable(cls, environ: Mapping[str, str], name: str) -> "Window | None":
        """Return the window from the variable `name`; None if it is not set or empty.

        Raises:
            ValueError: the variable is not a number of 0 or more.
        """
        text = environ.get(name)
        if not text:
            return None
        seconds = number(text)
        if seconds is None or seconds < 0:
            raise ValueError(f"{name}={text!r}: must be 0 or more seconds")
        return cls(seconds, name)


class Decision(NamedTuple):
    """Whether to save now (`flush`), and the reason as one sentence."""

    flush: bool
    why: str


def decide(
    notice: Notice, save_s: float | None, margin: float = DEFAULT_MARGIN, *, now_s: float | None = None
) -> Decision:
    """Decide whether a save fits in the remaining time; if not, rely on the last checkpoint.

    Args:
        notice: the notice.
        save_s: measured duration of a save, in seconds (C of the cadence); None if none was measured yet.
        margin: safety factor for the duration, 1 or more.
        now_s: current time, in seconds since the epoch; by default read from the clock.

    Raises:
        ValueError: `save_s` is negative, `margin` is less than 1, or one of them is not finite.
    """
    if not (math.isfinite(margin) and margin >= 1):
        raise ValueError(f"margin={margin}: must be a factor of 1 or more")
    if save_s is not None and not (math.isfinite(save_s) and save_s >= 0):
        raise ValueError(f"save_s={save_s}: must be 0 or more seconds, or None")
    said = f"{notice.platform} reports {notice.kind}"
    if not notice.certain:
        return Decision(True, f"Save now: {said}, which is a recommendation; the training continues after the save.")
    left_s = notice.left_s(time.time() if now_s is None else now_s)
    if left_s is None:
        return Decision(True, f"Save now: {said}, and the end is unknown.")
    if left_s == 0:
        return Decision(False, f"Rely on the last checkpoint: {said}, and no time is left.")
    if save_s is None:
        return Decision(True, f"Save now: {said} in {left_s:.1f} s, and no save has been measured yet.")
    needs = f"a save takes {save_s:.1f} s, times {margin:g} for the margin"
    if save_s * margin <= left_s:
        return Decision(True, f"Save now: {said} in {left_s:.1f} s, and {needs}.")
    return Decision(False, f"Rely on the last checkpoint: {said} in {left_s:.1f} s, and {needs}.")


def number(text: str | None) -> float | None:
    """Parse a finite number; None if it is invalid. Used for variables of other programs, whose errors are ignored."""
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if math.isfinite(value) else None


class Watcher:
    """Receives the notices of one platform. Not thread-safe."""

    platform: ClassVar[str]
    """Short name of the platform, as in `MIZZEN_PLATFORM`."""
    kind_of_signal: ClassVar[Kind] = Kind.STOP
    """What a signal means."""

    def __init__(
        self,
        window: Window,
        *,
        period_s: float | None = None,
        signals: tuple[signal.Signals, ...] = (signal.SIGTERM,),
        lead_s: float = DEFAULT_LEAD_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Initialize the base class. Create watchers through their subclasses.

        Args:
            window: time from the platform's notice to the end.
            period_s: seconds between calls of `poll`; None if the platform cannot be polled.
            signals: signals that are notices.
            lead_s: how long before a known end the notice is given, in seconds.
            clock: returns seconds since the epoch.
        """
        self.window = window
        self.period_s = period_s
        self.signals = signals
        self.lead_s = lead_s
        """How long before a known end the notice is given, in seconds. Can be changed at any time, for example to a
        multiple of the duration of a save."""
        self.ends_at_s: float | None = None
        """The certain end of the machine or job, in seconds since the epoch; None if unknown. A `poll` may set it."""
        self._clock = clock

    def poll(self) -> Notice | None:
        """Return the platform's current notice; None if there is none. Takes some seconds (Azure's first: up to 130 s).

        Raises:
            MetadataError: a metadata server does not respond, or its response is invalid. Poll again later.
        """
        return None

    def on_signal(self, received: int) -> Notice:
        """Return the notice of a received signal. Runs in a signal handler, so it must not take locks or do I/O."""
        return self._notice(self.kind_of_signal, signal.Signals(received).name)

    def exact(self, notice: Notice) -> Notice | None:
        """Return a notice with the end that the platform has announced for it; None: its end is only assumed.

        Unlike `on_signal`, this may read a small file.
        """
        return None if notice.kind is Kind.STOP else notice

    def acknowledge(self) -> None:
        """Tell the platform that it need not wait any longer, if it supports that and the user enabled it.

        Most platforms accept no acknowledgement.

        Raises:
            MetadataError: the request failed.
        """

    def _notice(self, kind: Kind, words: str, ends_at_s: float | None = None, window: Window | None = None) -> Notice:
        """Return a notice of a certain end: at `ends_at_s`, or else one window from now."""
        now_s = self._clock()
        if ends_at_s is None:
            ends_at_s = now_s + (window or self.window).seconds
        return Notice(self.platform, kind, now_s, ends_at_s, True, words[:MAX_WORDS])
