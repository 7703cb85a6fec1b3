"""Slurm: SIGTERM before SIGKILL at preemption and at the time limit, and earlier where `--signal` asks for it."""

import os
import signal
import time
from collections.abc import Callable, Mapping

from mizzen.notices.notice import DEFAULT_LEAD_S, Kind, Notice, Watcher, Window, number

WINDOW_S = 30.0
"""Slurm's default of `KillWait`."""

PERIOD_S = 5.0

_EARLY_S = 60.0
# Slurm may send the signal of `--signal` this much before its time.


class SlurmWatcher(Watcher):
    """A job of Slurm.

    Its end is known from `SLURM_JOB_END_TIME`, so it is told `lead_s` before even where the script asked for no signal.
    The signal and lead of `--signal` are read from `MIZZEN_SLURM_SIGNAL` or `SBATCH_SIGNAL`, in Slurm's own form
    (`B:TERM@360`): Slurm does not tell a job what its script's `#SBATCH` lines said.
    """

    platform = "slurm"

    def __init__(
        self,
        environ: Mapping[str, str] | None = None,
        *,
        lead_s: float = DEFAULT_LEAD_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Read the job's environment; what Slurm did not set, or set badly, is not known.

        Raises:
            ValueError: `MIZZEN_SLURM_SIGNAL` or `MIZZEN_NOTICE_WINDOW_S` is not in its form.
        """
        environ = os.environ if environ is None else environ
        ours = environ.get("MIZZEN_SLURM_SIGNAL")
        asked = _signal_and_lead(ours or environ.get("SBATCH_SIGNAL", ""))
        if ours and asked is None:
            raise ValueError(f"MIZZEN_SLURM_SIGNAL={ours!r}: must be as in Slurm's --signal, such as B:TERM@360")
        signals = [signal.SIGTERM]
        if asked and asked[0] != signal.SIGTERM:
            signals.append(asked[0])
        limit_s = number(environ.get("SLURM_JOB_END_TIME"))
        ends_at_s = limit_s if limit_s and limit_s > 0 else None
        self.requeues = int(number(environ.get("SLURM_RESTART_COUNT")) or 0)
        """How often the job was put back into the queue."""
        self._asked = asked
        super().__init__(
            Window.told(environ, WINDOW_S, "Slurm's default of KillWait"),
            period_s=PERIOD_S if ends_at_s is not None else None,
            signals=tuple(signals),
            lead_s=lead_s,
            clock=clock,
        )
        self.ends_at_s = ends_at_s

    def poll(self) -> Notice | None:
        """The time limit, when it is near."""
        if self.ends_at_s is None or self._clock() < self.ends_at_s - self.lead_s:
            return None
        return self._notice(Kind.WALLTIME, f"SLURM_JOB_END_TIME={self.ends_at_s:.0f}", self.ends_at_s)

    def on_signal(self, received: int) -> Notice:
        """The signal of `--signal` near the limit, the limit itself, or else preemption."""
        now_s, name = self._clock(), signal.Signals(received).name
        words = f"{name}, requeued {self.requeues} times"
        if self.ends_at_s is not None and now_s >= self.ends_at_s:
            return self._notice(Kind.WALLTIME, words)
        if self._asked and received == self._asked[0]:
            lead_s = self._asked[1]
            if self.ends_at_s is None:
                # Where preemption sends this signal too (SIGTERM), the shorter of both windows is the safe one.
                short = received == signal.SIGTERM and self.window.seconds < lead_s
                return self._notice(Kind.WALLTIME, words, None if short else now_s + lead_s)
            if now_s >= self.ends_at_s - lead_s - _EARLY_S:
                return self._notice(Kind.WALLTIME, words, self.ends_at_s)
        return self._notice(Kind.PREEMPT, words)


def _signal_and_lead(text: str) -> tuple[signal.Signals, float] | None:
    """The signal and the seconds of `[{R|B}:]<signal>[@<seconds>]`; None where it is not in that form."""
    name, _, lead = text.rpartition(":")[2].partition("@")
    lead_s = number(lead or "60")
    name = name.upper()
    try:
        wanted = signal.Signals(int(name)) if name.isdigit() else signal.Signals["SIG" + name.removeprefix("SIG")]
    except (KeyError, ValueError):
        return None
    if lead_s is None or lead_s < 0 or wanted in (signal.SIGKILL, signal.SIGSTOP):
        return None
    return wanted, lead_s
