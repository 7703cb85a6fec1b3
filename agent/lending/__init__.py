"""What the owner of a machine lends: the durable record, lending hours, the owner's socket, and taking resources back.

Everything here works while Temporal, Postgres and the API are unreachable.
"""
