"""Decisions of a Regional ML Scheduler, RMS (MAST 4.3): placement of a gang in a region, and the evictions it needs.

The package contains fit and packing, the choice of victims, the estimate of their lost work, bids, and the plain
reference implementation that tests compare them with. All functions are pure functions of a snapshot and a request: no
clock, no randomness, no database, no network. The package imports only `domain` and numpy.
"""
