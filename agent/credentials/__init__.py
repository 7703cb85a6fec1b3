"""Credentials of tasks: temporary ones, for the prefixes of buckets that their workload needs, and for nothing else."""
