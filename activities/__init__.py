"""Every effect that a workflow asks for, one file a noun. May import the decision packages, `infra/` and value types.

`scheduling/` decides and awards, `data/` copies and checks what buckets hold, `lifecycle/` starts, follows and ends
workloads and machines. `roles.py` says which of them a worker of a role serves.

Each effect is idempotent by keys that its workflow chose: carried out again, it finds what the first try did.
"""
