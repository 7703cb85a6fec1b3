"""What a notice says, and the one interface of all platforms' watchers."""

import math
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

MAX_WORDS = 500
"""A platform's own words are cut to this many characters."""

DEFAULT_LEAD_S = 120.0


class Kind(StrEnum):
    """What will happen."""

    PREEMPT = "preempt"
    """The platform wants the machine back."""
    REBALANCE = "rebalance"
    """The platform expects that it may want the machine back, and advises to leave."""
    WALLTIME = "walltime"
    """The job's time limit is near."""
    AGE_LIMIT = "age-limit"
    """The machine reaches the greatest age that its platform allows."""
    STOP = "stop"
    """A signal to stop, without a reason."""


@dataclass(frozen=True)
class Notice:
    """A platform's word that this process or its machine will be stopped."""

    platform: str
    kind: Kind
    seen_at_s: float
    """When this process learnt it, in seconds since the epoch."""
    ends_at_s: float | None
    """When the process is killed or the machine goes away, in seconds since the epoch; None: not known."""
    certain: bool
    """Whether the end is certain; False: a recommendation to leave."""
    words: str
    """What the platform said, at most 500 characters."""

    def left_s(self, now_s: float) -> float | None:
        """Seconds from `now_s` (epoch) until the end, 0 or more; None where the end is not known."""
        return None if self.ends_at_s is None else max(0.0, self.ends_at_s - now_s)

    def supersedes(self, other: "Notice | None") -> bool:
        """Whether this one should be acted upon in place of `other`: a certain end before advice, then the earlier."""
        if other is None:
            return True
        if self.certain != other.certain:
            return self.certain
        if not self.certain or self.ends_at_s is None:
            return False
        return other.ends_at_s is None or self.ends_at_s < other.ends_at_s


@dataclass(frozen=True)
class Window:
    """How long a platform leaves from its notice to the end, and where that figure comes from."""

    seconds: float
    source: str

    @classmethod
    def told(cls, environ: Mapping[str, str], seconds: float, source: str) -> "Window":
        """`MIZZEN_NOTICE_WINDOW_S` where it is set, else the platform's own figure.

        Raises:
            ValueError: the variable is not 0 or more seconds.
        """
        return cls.of_variable(environ, "MIZZEN_NOTICE_WINDOW_S") or cls(seconds, source)

    @classmethod
    def of_variable(cls, environ: Mapping[str, str], name: str) -> "Window | None":
        """The window that the variable `name` sets; None where it is absent or empty.

        Raises:
            ValueError: it is not 0 or more seconds.
        """
        text = environ.get(name)
        if not text:
            return None
        seconds = number(text)
        if seconds is None or seconds < 0:
            raise ValueError(f"{name}={text!r}: must be 0 or more seconds")
        return cls(seconds, name)


def number(text: str | None) -> float | None:
    """The finite number that `text` is, or None: for variables that others set, which are ignored when they are bad."""
    try:
        value = float(text or "")
    except ValueError:
        return None
    return value if math.isfinite(value) else None


class Watcher(ABC):
    """Knows one platform: how it tells, how long it leaves. Not for use by several threads at once."""

    platform: ClassVar[str]
    """Its short name, as in `MIZZEN_PLATFORM`."""

    def __init__(
        self,
        window: Window,
        *,
        period_s: float | None = None,
        signals: tuple[signal.Signals, ...] = (signal.SIGTERM,),
        lead_s: float = DEFAULT_LEAD_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Watchers are made by their own classes; see there.

        Args:
            window: from the platform's notice to the end.
            period_s: how often to call `poll`; None where there is nothing to poll.
            signals: those that are a notice.
            lead_s: how long before it an end that is known from the start is told.
            clock: seconds since the epoch.
        """
        self.window = window
        self.period_s = period_s
        self.signals = signals
        self.lead_s = lead_s
        """May be set at any time, such as to a multiple of what a save takes."""
        self.ends_at_s: float | None = None
        """When the machine or the job goes for certain, in seconds since the epoch; None: not known. It may become
        known by a `poll`."""
        self._clock = clock

    @abstractmethod
    def poll(self) -> Notice | None:
        """What the platform says now; None: nothing. Takes seconds at most, but for Azure's first answer.

        Raises:
            MetadataError: a metadata server does not answer, or not as it should. Ask again later.
        """

    def on_signal(self, received: int) -> Notice:
        """The notice that a signal is. Runs in the signal's handler: takes no lock, does no input or output."""
        return self._notice(Kind.STOP, signal.Signals(received).name)

    def acknowledge(self) -> None:  # noqa: B027  # Most platforms do not listen.
        """Tell the platform that it need not wait any longer, where one listens and the user asked for it.

        Raises:
            MetadataError: it could not be told.
        """

    def _notice(self, kind: Kind, words: str, ends_at_s: float | None = None, window: Window | None = None) -> Notice:
        """A certain end: at `ends_at_s`, or else after the window from now."""
        now_s = self._clock()
        if ends_at_s is None:
            ends_at_s = now_s + (window or self.window).seconds
        return Notice(self.platform, kind, now_s, ends_at_s, True, words[:MAX_WORDS])
