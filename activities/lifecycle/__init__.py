"""Activities on workloads and machines: mail to workflows, launches, releases, progress, reconciling, housekeeping."""
