"""When to save: the interval that wastes least, from how often the gang is interrupted and what a save costs.

    cadence = Cadence.from_environ()
    cadence.begin(step)
    while step < steps:
        step = train_one_step()
        if cadence.should_save(step):
            held_s = save(step)
            cadence.saved(step, held_s)

`formula` has the interval, `interruptions` where the mean time between interruptions comes from, `choice` one choice
with its reasons, `timer` the object that measures a run and says when. Standard library only.
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
