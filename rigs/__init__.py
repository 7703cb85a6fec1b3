"""Rigs that are too long or too destructive for the suite: crashes of whole machines, and long demos."""
