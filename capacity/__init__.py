"""Pools of launched machines: offers, pool sizing, and the interface of machine providers. The package does no I/O.

An instance is one machine that was requested from a provider. Its lifecycle is a table in `domain.lifecycle.instances`,
its database rows are in `infra.db.capacity`, and its activities are in `activities.capacity`. The providers are in
`providers`.
"""
