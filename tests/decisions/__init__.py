"""The decisions of GMS and RMS: against their plain references, against what must never happen, and by example."""

from hypothesis import HealthCheck, settings

PROPERTY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""What the property tests here have in common: nothing about a slow machine is a failure."""
