"""The node agent: its tasks are real processes, its Temporal a real dev server."""
