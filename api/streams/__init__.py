"""Streams: events as they happen (SSE) and logs as they come, for a bounded number of followers."""
