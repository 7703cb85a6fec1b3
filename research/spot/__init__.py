"""Replays of the availability of spot machines, for policies of services (SkyServe)."""
