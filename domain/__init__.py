"""Value types that several rooms share: resources, priority, phases, reasons, plans, the specification of a workload
and the messages between workflows, activities and agents.

Everything here is frozen data with no I/O, clock or randomness, and may import nothing of ours.
"""
