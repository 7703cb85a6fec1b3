"""Estimates how often the machines of a cluster are interrupted, from the interruptions that were observed."""

FEWEST_INTERRUPTIONS = 3
FEWEST_MACHINE_H = 1000.0
"""With fewer than `FEWEST_INTERRUPTIONS`, at least this many machine hours are needed to conclude that interruptions
are rare."""


def hazard_per_h(interruptions: int, machine_h: float) -> float | None:
    """Returns the interruptions per machine hour, more than 0; None: there are too few observations for an estimate.

    The estimate is (k + 1/2) / h for k interruptions in h machine hours: the posterior mean of a Poisson rate under
    Jeffreys' prior. So the estimate is never 0 when no interruption was observed, and the added half has little effect
    when there were many.

    An estimate is returned after 3 interruptions: the hazard is then known within a factor of about two, and a
    checkpoint interval chosen from it within a factor of 1.4, which adds a few percent to the unavoidable waste. It is
    also returned after 1000 machine hours, which show that interruptions are rarer than any prior for spot machines
    assumes. With fewer observations, a prior for the platform is more accurate.

    Raises:
        ValueError: a number is negative.
    """
    if interruptions < 0 or not machine_h >= 0:
        raise ValueError(f"interruptions={interruptions}, machine_h={machine_h}: must be 0 or more")
    if machine_h == 0 or (interruptions < FEWEST_INTERRUPTIONS and machine_h < FEWEST_MACHINE_H):
        return None
    return (interruptions + 0.5) / machine_h
