"""Alembic's entry: runs on the connection that `infra.db.migrate` hands over."""

from alembic import context

from infra.db.schema import SCHEMA

context.configure(connection=context.config.attributes["connection"], target_metadata=SCHEMA)
with context.begin_transaction():
    context.run_migrations()
