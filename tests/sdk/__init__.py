"""The SDK, and the example trainer that uses it."""
