"""Processes between clients and servers: the gateway to Temporal for agents, and the balancer of services."""
