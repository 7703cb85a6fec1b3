"""Notifications of receivers outside: webhooks and mail."""
