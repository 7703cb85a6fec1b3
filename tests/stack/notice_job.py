"""A job for stack tests whose first attempt receives a preemption notice from the platform: `leaving.py GATE`.

The first attempt reports the notice, waits until it has been stopped and GATE exists, and saves. The next attempt
loads that checkpoint and ends.
"""

import sys
import time
from pathlib import Path

import mizzen
from mizzen import report
from mizzen.checkpoint import Checkpointer
from mizzen.notices import Kind, Notice

gate = Path(sys.argv[1])
saver = Checkpointer()
report.loading()
found = saver.load_latest()
report.loaded(found.step if found else None)
report.cadence(805.0, 30.0, 10800.0, 2.0, "platform")
if found:
    print(f"resumed from step {found.step}", flush=True)
    sys.exit(0 if found.step == 7 else 1)
saver.save(3, {"step": 3})
mizzen.progress(7)
report.noticed(Notice("gcp", Kind.PREEMPT, time.time(), time.time() + 30, True, "preempted is TRUE"), "Save now.")
while not (mizzen.preempted() and gate.exists()):
    time.sleep(0.05)
saver.save(7, {"step": 7})
mizzen.exit_preempted()
