"""Decisions about machines whose owners can take them back at any time: ReclaimNet's protocols.

The hazard of departures, the bandwidth of links, when each job saves (P1), where work of a leaving machine goes (P2),
and which migration traffic is admitted at which rate (P3). The package does no I/O and reads no clock: times, logs and
samples are arguments, states are values that can be stored as JSON, and every random draw has a seed. Decisions are
vectorised over the jobs or the nodes of a site.

Names carry units: `_bytes`, `_bytes_s` (bytes per second), `_s`, `_per_h` (events per hour). Sections, equations and
theorems in docstrings are those of the ReclaimNet paper.
"""
