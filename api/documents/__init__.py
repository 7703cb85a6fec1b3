"""Reads workload and service documents, YAML or JSON, into specifications, and reports all errors at once.

`loading` parses YAML and JSON, and `at` tracks paths and collects errors. `workload` and `service` (with `replicas`,
`serving` and `skypilot`) declare each field once, with the `forms` that read values and state their JSON Schema.
`schema` has the published schemas. `checking` and `feasible` check a document against the installation: its tenants,
tables, machines and secrets.
"""
