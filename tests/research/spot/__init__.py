"""Tests of the replays of spot capacity."""
