"""Parses workload documents, YAML or JSON, into `domain.spec.WorkloadSpec`, and reports all errors at once.

`loading` parses YAML and JSON, `at` tracks paths and collects errors, `values`, `jobs` and `workload` validate the
fields, `checking` and `feasible` check the document against the installation (tenants, tables, machines, secrets), and
`schema` is the JSON Schema.
"""
