"""The lifecycles of attempts and instances: the transitions between phases, and the consequences of an end.

The tables and functions do no I/O. Workflows, the simulator and tests use them. The package imports value types only.
"""
