"""Plain implementations that tests, benchmarks and research compare the fast ones with."""
