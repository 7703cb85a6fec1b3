"""The SDK against the real libraries: torch, transformers, lightning. `make test-integrations` runs them."""
