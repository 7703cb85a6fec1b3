"""Replicas of a service on spot machines: where to launch them, and how many on-demand replicas to keep beside them.

A policy is a pure function from its state and an observation to its next state and actions (`services.spot.values`).
The package contains SpotHedge (SkyServe, sections 3 and 4), the policies that it is compared with, the autoscaler, and
a replay that measures a policy on traces of spot capacity and of requests. Only the readers of the traces do I/O
(`research.spot.traces`, `research.spot.request_files`). The package reads no clock, and every random draw has a seed.
"""
