"""Every effect that a workflow asks for, one file a noun. May import the decision packages, `infra/` and value types.

Each effect is idempotent by keys that its workflow chose: carried out again, it finds what the first try did.
"""
