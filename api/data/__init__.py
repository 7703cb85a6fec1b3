"""Endpoints for the input of workloads: tables with their replicas, and uploaded working directories."""
