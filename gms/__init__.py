"""Decisions of the Global ML Scheduler, GMS (MAST 4.2): the <priority, credit> of each workload and the queue order.

The package contains the scan, the credit, the quota check, and the plain reference implementation that tests compare
them with. All functions are pure functions of a snapshot: no clock, no randomness, no database, no network. The package
imports only `domain` and numpy.
"""
