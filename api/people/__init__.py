"""Endpoints for tenants and their quotas, secrets, API keys and the audit log."""
