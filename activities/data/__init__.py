"""Activities on tables and checkpoints: copies, replicas, placement runs, and checks of buckets and their content."""
