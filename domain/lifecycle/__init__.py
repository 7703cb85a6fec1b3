"""The lifecycles of attempts and instances: which phase follows which event, and what follows from an ending.

The tables and functions do no I/O. Workflows, the simulator and tests use them. The package imports value types only.
"""
