"""Workloads: submitting, listing, changing, and why each is where it is."""
