"""The auction (MAST 4.2, 4.3): regions bid on the head of the queue, and the best plans are awarded in queue order.

The package contains the choice of the winning plan, the detection of stale bids, reservations for workloads that have
waited too long, and the backoff for regions that do not answer. It has only pure functions and in-memory state: no
clock, no randomness, no database, no network. It imports only `domain`, `rms` and numpy.
"""
