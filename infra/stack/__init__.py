"""The embedded stack of `mizzen up`: Postgres, Temporal's dev server, workers, the API and the agents of a small fleet.

All parts are child processes of one supervisor. Postgres and Temporal come from wheels.
"""
