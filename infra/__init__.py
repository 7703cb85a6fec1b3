"""What the system stands on: database models and migrations, object stores, the Temporal client, configuration and the
embedded stack. May import value types (`domain`), and nothing that decides.
"""
