"""Activities on workloads and machines: messages, launches, releases, progress, reconciling, housekeeping."""
