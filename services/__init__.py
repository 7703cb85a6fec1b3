"""The replicas of a service over time: which are launched, replaced, drained and ended. Pure.

`spot` decides where replicas run and how many there are. This package decides what follows for the replicas of a live
service: failures, updates to a new version, and draining. `activities/services/` carries the decisions out.
"""
