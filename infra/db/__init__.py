"""Postgres: tables (`models` has the facts, `logs` the rest), sessions (`session`), the event log (`events`), mail to
workflows (`outbox`) and the allocation guard (`migrations`): the database itself refuses two holders of a slot.
"""
