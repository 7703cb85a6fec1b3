"""Activities on tables and checkpoints: copies, replicas, nights, and checks of buckets and their content."""
