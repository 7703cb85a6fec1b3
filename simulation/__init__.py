"""The simulator: replays a trace, or a snapshot of the live system, through the decision packages on a virtual clock.

The package contains the trace readers, the random draws for values that a trace lacks, the event loop, the policies
that are compared, the metrics and the report. The results are a function of the inputs and a seed. The package imports
`domain`, the decision packages, the fleet file's model, numpy and the libraries of its readers and pictures; never a
database or a network client.
"""
