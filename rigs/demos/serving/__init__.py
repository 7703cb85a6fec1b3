"""A service under load while its machines and mizzen's processes are killed: `python -m rigs.demos.serving`."""
