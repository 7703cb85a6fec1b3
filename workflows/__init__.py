"""Temporal workflows: workload and instance lifecycles, the scheduling loop, machine registration, housekeeping, table
copies, their verification, and placement runs.

A workflow only orders activities. Decisions are made by the decision packages inside activities, and facts are stored
in Postgres. Workflows may import value types (`domain`) only, and must be able to run in Temporal's sandbox.
"""
