"""Runs Python functions as workloads: `mizzen.Executor` (`mizzen-client[functions]`). See `docs/python.md`.

`executor.py` is a `concurrent.futures.Executor`. `calls.py` pickles calls into an archive, `runner.py` runs one of them
in a task, and `watch.py` waits for many futures with few requests. `mizzen_client.submitit` and `mizzen_client.joblib`
have the interfaces of these libraries.
"""
