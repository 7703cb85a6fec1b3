"""`mizzen kueue-dispatcher`: an external dispatcher of MultiKueue, which nominates worker clusters by the auction."""
