"""The gateway: agents of machines that the installation does not trust reach Temporal only through it.

An authenticating gRPC proxy for the few methods of Temporal that an agent calls. The caller's API key names one
machine, and the gateway forwards only calls that concern this machine (`docs/volunteers.md`). It may import value types
(`domain`), keys and settings (`infra`) and Temporal's generated messages, but no scheduling package, no workflow, no
agent and no API code. Only this package imports grpc.
"""
