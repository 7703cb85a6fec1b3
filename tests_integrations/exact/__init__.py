"""Trainings as people write them, in five frameworks: after kills each ends with the same bytes as without."""
