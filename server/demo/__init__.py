"""`mizzen demo`: runs gangs on an embedded stack, shows events live, checks the results, and writes a report."""
