"""Compares schedulers on real traces (MAST 5.6): `make experiment` writes docs/experiments.md."""
