"""The workload document: from YAML or JSON to `domain.spec.WorkloadSpec`, with all that is wrong told at once.

`loading` reads the form, `at` walks it, `values` and `workload` read what it means, `checking` compares it with what
there is (tenants, tables, machines, secrets), and `schema` describes it for people and programs.
"""
