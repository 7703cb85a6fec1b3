"""The activities of all workflows. They may import the decision packages, `infra/` and value types.

`scheduling/` scans, bids and awards. `data/` copies and verifies tables and checkpoints. `lifecycle/` starts, monitors
and ends workloads and machines. `capacity/` sizes pools and launches machines. `roles.py` defines which activities a
worker of each role runs.

Every activity is idempotent: its workflow chooses the keys, and a retry finds the result of the first try.
"""
