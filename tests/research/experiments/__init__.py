"""Tests of the comparison of schedulers, in a short form on small generated data."""
