"""The comparison of schedulers, in a short form on small data of its own."""
