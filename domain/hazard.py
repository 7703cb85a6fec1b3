"""How often machines of a cluster are interrupted, by what was seen there."""

FEWEST_INTERRUPTIONS = 3
FEWEST_MACHINE_H = 1000.0
"""Without so many interruptions, so many machine hours tell that they are rare."""


def hazard_per_h(interruptions: int, machine_h: float) -> float | None:
    """Interruptions per machine hour, more than 0; None: too little was seen to say.

    The estimate is (k + 1/2) / h for k interruptions in h machine hours: the mean of what they make likely, if nothing
    was known before (a Poisson rate under Jeffreys' prior). So a quiet time is never taken for a hazard of 0, and half
    an interruption more or less does not matter where there were many.

    It says something after 3 interruptions: the hazard is then within a factor of two or so, and an interval chosen by
    it within 1.4, which wastes some percent of what is wasted in any case. Or after 1000 machine hours, which tell that
    interruptions are rarer than any prior of a spot machine has it. With less, a prior of the platform knows more.

    Raises:
        ValueError: a number is negative.
    """
    if interruptions < 0 or not machine_h >= 0:
        raise ValueError(f"interruptions={interruptions}, machine_h={machine_h}: must be 0 or more")
    if machine_h == 0 or (interruptions < FEWEST_INTERRUPTIONS and machine_h < FEWEST_MACHINE_H):
        return None
    return (interruptions + 0.5) / machine_h
