"""Measurements of `reclaim/` on synthetic sites, for docs/reclaim.md: `python -m research.experiments.reclaim`."""
