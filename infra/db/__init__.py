"""Postgres: tables (`models` has the facts, `logs` the rest), sessions (`session`), the event log (`events`), mail to
workflows (`outbox`), the catalogue of tables (`catalogue`), the usage of tables by jobs (`usage`), and what the database
itself refuses (`migrations`): two holders of a slot, a table whose home lacks a part of it.
"""
