"""The auction (MAST 4.2, 4.3): the head of the queue against all regions, each award seen by the bids after it.

What belongs here: which plan of which region a workload gets, what an award makes stale, the joint choice for the head
of the queue, reservations of those who waited too long, and the plain reference. Only pure functions and state in
memory: no clock, chance, database or network. It imports only `domain`, `rms`, numpy and OR-Tools.
"""
