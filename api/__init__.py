"""The REST API: endpoints, event and log streams, and metrics.

The API reads from Postgres, and records each change that a client requests in one transaction: rows, outbox, audit
entry and event. It makes no scheduling decisions: the scheduler and the workflows place, evict and stop workloads. This
package may import only `infra` and `domain`.
"""
