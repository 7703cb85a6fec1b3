"""Activities on instances and pools: the ledger, requests to providers, and the loop that reconciles both."""
