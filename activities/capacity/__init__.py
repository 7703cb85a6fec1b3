"""Effects on instances and pools: the ledger, what is asked of providers, and the loop that compares both."""
