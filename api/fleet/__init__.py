"""Endpoints for the fleet: regions, clusters, machines, pools and instances."""
