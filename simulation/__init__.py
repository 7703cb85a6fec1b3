"""The simulator: traces, or an exported snapshot of the live system, through the decision packages on a virtual clock.

What belongs here: readers of traces, what is drawn where a trace is silent, the clock, the policies that are compared,
what is measured, and the report. Everything follows from its inputs and a seed. It imports `domain`, the decision
packages, the fleet file's model, numpy and the libraries of its readers and pictures; never a database or a network.
"""
