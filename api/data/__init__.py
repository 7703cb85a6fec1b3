"""What workloads read: tables with their replicas, and uploaded working directories."""
