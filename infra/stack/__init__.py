"""The embedded stack: Postgres and Temporal's dev server from wheels, workers, the API and a small fleet's agents, all
children of one supervisor (`mizzen up`).
"""
