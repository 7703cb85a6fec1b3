"""Endpoints for workloads: submission, lists, changes, the queue, and reasons."""
