"""Replicas of a service on spot machines: where to launch them, and how many on-demand replicas to keep beside them.

A policy is a pure function from its state and an observation to its next state and actions (`services.spot.values`).
The package contains SpotHedge (SkyServe, sections 3 and 4) and the autoscaler. It reads no clock, and
every random draw has a seed. `research.spot` measures policies on traces of spot capacity and of requests.
"""
