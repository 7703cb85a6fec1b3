"""Schedulers that MAST is compared with: Slurm and Kueue, as their documentation defines them.

They decide on the simulator's clock and its ledgers, which refuse a slot that is given out twice. Each says whose turn
it is and where the workload goes; what follows from an award is the same for all policies.
"""
