"""Tests of the simulated schedulers, the replays and the experiments."""
