"""Endpoints for services: documents, replicas, endpoints for balancers, and the requests that balancers counted."""
