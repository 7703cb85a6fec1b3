"""The fleet: regions, clusters and machines, and what operators do to them."""
