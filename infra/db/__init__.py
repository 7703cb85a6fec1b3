"""The Postgres database: models, sessions, the event log, the outbox, the catalogue of tables and their usage.

`models` and `tables` contain the primary data, `logs` contains logs and derived data. Constraints of the models and
triggers in `functions` enforce invariants independently of the Python code, for example that a GPU slot has one holder
and that a table's home region has all partitions.
"""
