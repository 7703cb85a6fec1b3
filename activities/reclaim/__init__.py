"""Machines whose owners can take them back: when the jobs on them save (ReclaimNet's P1 on the live fleet)."""
