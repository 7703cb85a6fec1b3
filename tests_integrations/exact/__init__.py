"""Trainings as people write them, in six frameworks: after kills each ends with the same bytes as without."""
