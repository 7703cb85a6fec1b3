"""Slurm: SIGTERM before SIGKILL at preemption and at the time limit, and an earlier signal with `--signal`."""

import os
import signal
import time
from collections.abc import Callable, Mapping

from mizzen.notices.notice import DEFAULT_LEAD_S, Kind, Notice, Watcher, Window, number

WINDOW_S = 30.0
"""Slurm's default for `KillWait`."""

PERIOD_S = 5.0

_EARLY_S = 60.0
# Slurm may send the signal of `--signal` up to this long before the requested time.


class SlurmWatcher(Watcher):
    """Watcher of a Slurm job.

    The job's end is read from `SLURM_JOB_END_TIME`, so a notice is given `lead_s` seconds before it even if the script
    requested no signal. The signal and lead time of `--signal` are read from `MIZZEN_SLURM_SIGNAL` or `SBATCH_SIGNAL`,
    in Slurm's format (`B:TERM@360`), because Slurm does not pass the `#SBATCH` lines of the script to the job.
    """

    platform = "slurm"

    def __init__(
        self,
        environ: Mapping[str, str] | None = None,
        *,
        lead_s: float = DEFAULT_LEAD_S,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Read the job's environment. Missing or invalid variables of Slurm are ignored.

        Raises:
            ValueError: `MIZZEN_SLURM_SIGNAL` or `MIZZEN_NOTICE_WINDOW_S` is invalid.
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
        """Number of times the job was requeued."""
        self._asked = asked
        super().__init__(
            Window(WINDOW_S, "Slurm's default of KillWait").or_told(environ),
            period_s=PERIOD_S if ends_at_s is not None else None,
            signals=tuple(signals),
            lead_s=lead_s,
            clock=clock,
        )
        self.ends_at_s = ends_at_s

    def poll(self) -> Notice | None:
        """Return the notice of the time limit from `lead_s` seconds before it on; None earlier."""
        if self.ends_at_s is None or self._clock() < self.ends_at_s - self.lead_s:
            return None
        return self._notice(Kind.WALLTIME, f"SLURM_JOB_END_TIME={self.ends_at_s:.0f}", self.ends_at_s)

    def on_signal(self, received: int) -> Notice:
        """Return the notice of a signal: the time limit if it is near or reached, else preemption."""
        now_s, name = self._clock(), signal.Signals(received).name
        words = f"{name}, requeued {self.requeues} times"
        if self.ends_at_s is not None and now_s >= self.ends_at_s:
            return self._notice(Kind.WALLTIME, words)
        if self._asked and received == self._asked[0]:
            lead_s = self._asked[1]
            if self.ends_at_s is None:
                # Preemption also sends SIGTERM, so assume the shorter of the two windows.
                short = received == signal.SIGTERM and self.window.seconds < lead_s
                return self._notice(Kind.WALLTIME, words, None if short else now_s + lead_s)
            if now_s >= self.ends_at_s - lead_s - _EARLY_S:
                return self._notice(Kind.WALLTIME, words, self.ends_at_s)
        return self._notice(Kind.PREEMPT, words)


def _signal_and_lead(text: str) -> tuple[signal.Signals, float] | None:
    """Parse `[{R|B}:]<signal>[@<seconds>]` into signal and seconds; None if the format is invalid."""
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
