"""Temporary credentials of tasks, limited to the bucket prefixes that their workload needs."""
