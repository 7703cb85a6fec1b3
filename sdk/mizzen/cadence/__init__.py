"""Decides when to save a checkpoint: the interval that wastes the least time.

The interval follows from the rate of interruptions of the gang and the cost of a save.

    cadence = Cadence.from_environ()
    cadence.begin(step)
    while step < steps:
        step = train_one_step()
        if cadence.should_save(step):
            held_s = save(step)
            cadence.saved(step, held_s)

`formula` computes the interval, `interruptions` determines the mean time between interruptions, `choice` makes a choice
and explains it, and `timer` has the class `Cadence`, which measures a run. Only the standard library is needed.
"""

from mizzen.cadence.choice import Choice, choose
from mizzen.cadence.formula import best_interval_s, best_until_end, expected_time, expected_time_until_end
from mizzen.cadence.interruptions import PLATFORMS, UNKNOWN, Mtbf, Prior, mtbf, mtbf_of_environ
from mizzen.cadence.timer import Cadence

__all__ = [
    "PLATFORMS",
    "UNKNOWN",
    "Cadence",
    "Choice",
    "Mtbf",
    "Prior",
    "best_interval_s",
    "best_until_end",
    "choose",
    "expected_time",
    "expected_time_until_end",
    "mtbf",
    "mtbf_of_environ",
]
