"""RAS: which machines of a region belong to which pool, so that each pool keeps its size when machines fail.

`supply` counts machines by fault domain, type and pool; `intents` are the sizes that operators want; `solve` chooses
the numbers of machines with an integer program; `surplus` leaves what pools do not need; `moves` chooses the individual
machines. The package is pure.
"""
