"""GMS, the Global ML Scheduler's decisions (MAST 4.2): the <priority, credit> of every workload and the queue's order.

What belongs here: the scan pass, the credit, the quota, and the plain reference that they are tested against. Only pure
functions of a snapshot: no clock, chance, database or network. It imports only `domain` and numpy.
"""
