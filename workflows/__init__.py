"""Durable lifecycles: a workload's life, the scheduling loop, a machine's registration, housekeeping, a table's copy,
its verification, a night.

Workflows hold the order of effects and nothing else: what to do is decided by the decision packages inside activities,
and facts are Postgres's. They may import value types (`domain`) only, and run in Temporal's sandbox.
"""
