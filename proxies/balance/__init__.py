"""The load balancer of services: supervises HAProxy processes and keeps their lists of servers up to date.

HAProxy forwards the requests, one process for each service. This package owns the listening sockets, starts and
restarts HAProxy, follows the API's lists of replicas, changes the servers through HAProxy's runtime socket, and reports
the counts of requests to the API. It does not access the database or Temporal.
"""
