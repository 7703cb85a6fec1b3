"""Sessions in running tasks: their endpoints, and the forwarding between the client and the agent."""
