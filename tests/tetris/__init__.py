"""Tests of the slow path."""
