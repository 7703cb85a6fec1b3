"""Streams of events (server-sent events) and logs, with limits on their number."""
