"""Tests of the SDK and of the example trainer that uses it."""
