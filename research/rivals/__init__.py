"""Models of the schedulers that MAST is compared with: Slurm, Kueue, KAI and Volcano, as their documentation says.

They use the simulator's clock and its ledgers, which reject a double allocation. Each model defines the order of the
queue and the placement of a workload; the simulation after an award is the same for all policies.
"""
