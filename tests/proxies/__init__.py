"""Tests of the gateway and of the balancer."""
