"""Tests of the decisions of GMS and RMS: equality with reference implementations, invariants, and examples."""

from hypothesis import HealthCheck, settings

PROPERTY = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""Settings of all property tests here: a slow machine is no failure."""
