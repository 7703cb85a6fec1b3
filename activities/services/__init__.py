"""Services: the activity that decides about a service's replicas, and what it reads and writes."""
