"""Traces: rows of past workloads, and readers for their file formats. Bad rows are reported, never dropped silently."""
