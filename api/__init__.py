"""The REST API: requests and their answers, event and log streams, metrics.

What belongs here: reading Postgres for people and programs, and writing down what they ask for - rows, outbox, audit
and event in one transaction. It decides nothing: placing, evicting and stopping are the scheduler's and the workflows'.
It may import `infra` and `domain` only.
"""
