"""Who uses mizzen: tenants with quotas, their secrets, API keys, and the audit list."""
