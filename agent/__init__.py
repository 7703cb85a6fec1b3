"""The node agent: runs one machine's share of each gang, as a Temporal worker that only dials out.

What belongs here: the agent's activities, the shim under which each task runs, launch descriptions, port reservation,
log shipping, and the hosting of one or several machines' agents on a computer. May import value types (`domain`),
`mizzen.objects`, `infra.config`, `infra.errors` and `infra.temporal_client`; nothing that decides, no database, no API.
"""
