"""Tests of the SDK with the real torch, transformers and lightning. Run them with `make test-integrations`."""
