"""Notifications to external receivers: webhooks and e-mail."""
