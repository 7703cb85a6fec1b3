"""Traffic rules that the agent enforces on the network interface of a lent machine.

Contains the eBPF programs of the interface (classes, counters, the kill-switch), the HTB classes for the rates of
migrations, the guardian process that removes them, and pacing for machines without root or eBPF. `MachineNetwork`
(`agent/network/machine.py`) is the interface for the rest of the agent. Rates are decided elsewhere.
"""
