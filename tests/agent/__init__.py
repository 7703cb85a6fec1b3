"""Tests of the node agent, with real processes as tasks and a real Temporal dev server."""
