"""Postgres: tables (`models` has the facts, `logs` the rest), sessions (`session`), the event log (`events`), mail to
workflows (`outbox`), the catalogue of tables (`catalogue`) and their usage (`usage`). What must hold whatever the
code does, the database itself keeps (`migrations`): a slot has one holder, a table's home has all of it.
"""
