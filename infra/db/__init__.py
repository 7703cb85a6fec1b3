"""Postgres: tables (`models`), sessions (`session`), the event log (`events`), mail to workflows (`outbox`) and the
allocation guard, which lets the database itself refuse two holders of a slot (`migrations`).
"""
