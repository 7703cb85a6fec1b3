"""Tests of the decisions about the replicas of services."""
