"""Alembic's entry point. Runs the migrations on the connection that `infra.db.migrate` passes in the configuration."""

from alembic import context

from infra.db.schema import SCHEMA

context.configure(connection=context.config.attributes["connection"], target_metadata=SCHEMA)
with context.begin_transaction():
    context.run_migrations()
