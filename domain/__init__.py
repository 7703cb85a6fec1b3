"""Value types that several packages share: resources, priority, phases, reasons, plans, workload specifications, and
the messages between workflows, activities and agents.

Everything here is immutable data without I/O, clock or randomness. This package imports no other package of the
project.
"""
