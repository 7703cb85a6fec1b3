"""Typical trainings for the kill loops. Each writes `result.json` and `model.pt` to its folder."""
