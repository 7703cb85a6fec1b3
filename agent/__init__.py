"""The node agent: runs the tasks of each gang that are placed on one machine. A Temporal worker without open ports.

Contains the agent's activities, the shim that supervises each task, launch descriptions, port reservation, log
shipping, and a parent process that runs the agents of several machines on one computer. May import value types
(`domain`), `mizzen.objects`, `infra.config`, `infra.errors` and `infra.temporal_client`, but no scheduling package, no
database code and no API code.
"""
