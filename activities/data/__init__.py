"""Tables and checkpoints: copies, replicas, nights, checks of what buckets hold."""
