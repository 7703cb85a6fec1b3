import submitit
from jobs import clean

executor = submitit.LocalExecutor(folder="logs")
executor.update_parameters(timeout_min=10, local_setup=["true"], visible_gpus=(0, 1), unknown_thing=3)
executor.submit(clean, "out", True, None)
