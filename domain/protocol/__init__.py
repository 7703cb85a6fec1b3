"""Names and payloads of the messages between workflows, activities, agents and the outbox.

Payloads contain only references and small values. Plans, snapshots, specifications and secrets are never stored in
Temporal's history.
"""
