"""Trainings as people write them, for the kill loops: each leaves `result.json` and `model.pt` in its folder."""
