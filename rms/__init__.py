"""RMS, a Regional ML Scheduler's decisions (MAST 4.3): whether, where and at whose expense a gang fits into a region.

What belongs here: fit and packing, the choice of victims, the work that they lose, the bid, the comparison of bids,
and the plain reference that they are tested against. Only pure functions of a snapshot and a request: no clock, chance,
database or network. It imports only `domain` and numpy.
"""
