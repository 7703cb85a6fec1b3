"""Tests of the gateway, with a real Temporal dev server and real agents."""
