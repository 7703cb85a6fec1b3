"""Tasks that bring an image: they run as containers of an engine on the machine, such as Docker or Podman.

The shim of such a task (`agent.containers.container_shim`) has the container made, copies its output, gives it the
notice and records its exit status. `engine` is the interface of engines, `docker` the one of Docker's API.
"""
