"""Traces: rows of past workloads, and readers for the formats in which they come. A bad row is named, never dropped."""
