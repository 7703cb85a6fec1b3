"""Infrastructure: database models and migrations, the Temporal client, configuration, keys and the embedded stack.

May import value types (`domain`), but no scheduling package.
"""
