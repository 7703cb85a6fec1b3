"""The Postgres database: models, sessions, the event log, the outbox, the catalogue of tables and their usage.

`models` and `tables` contain the primary data, `logs` contains logs and derived data. Constraints and triggers in
`migrations` enforce invariants independently of the Python code, for example that a GPU slot has one holder and that a
table's home region has all partitions.
"""
