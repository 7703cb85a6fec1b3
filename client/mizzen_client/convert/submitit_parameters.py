"""The parameters of submitit's executors."""

from collections.abc import Mapping

SLURM_NAMES: Mapping[str, str] = {
    "time": "timeout_min", "job_name": "name", "ntasks_per_node": "tasks_per_node", 
}  # fmt: skip
"""Slurm's names of parameters, with or without `slurm_`, to those that are read."""
READ = frozenset({
    "additional_parameters", "array_parallelism", "constraint", "cpus_per_gpu", "cpus_per_task", "gpus_per_node",
    "gpus_per_task", "gres", "mem", "mem_gb", "mem_per_cpu", "mem_per_gpu", "name", "nodes", "num_gpus", "setup",
    "signal_delay_s", "tasks_per_node", "timeout_min",
})  # fmt: skip
"""The parameters that `submitit` reads, without `slurm_`."""
_TENANT = "the API key, or `tenant` in the document, decides who pays and which limits apply"
_MAIL = "add `notify: [{email: NAME@DOMAIN}]` to the document"
DROPPED: Mapping[str, str] = {
    "folder": "mizzen keeps the output of each task: `mizzen logs NAME`",
    "cluster": "mizzen runs the workload", "version": "it concerns submitit only", "max_num_timeout": "a preempted "
    "workload returns to the queue as often as it takes; `limits.max_runtime` is for all attempts together",
    "python": "the script runs with the machine's python3, or that of `.venv` if `setup` makes one",
    "partition": "mizzen has no partitions: resources and `regions` decide where it runs",
    "account": _TENANT, "qos": _TENANT, "wckey": _TENANT, "comment": "add `labels` for filters",
    "stderr_to_stdout": "both are in `mizzen logs NAME`", "mail_type": _MAIL, "mail_user": _MAIL,
    "srun_args": "mizzen starts the tasks itself",
    "use_srun": "mizzen starts the tasks itself", "exclude": "mizzen chooses the machines itself",
    "visible_gpus": "a task sees its own GPUs", "ntasks_per_core": "it concerns the layout on a node only",
}  # fmt: skip
LOST: Mapping[str, str] = {
    "nodelist": "a document cannot name machines: restrict `regions`",
    "exclusive": "ask for all GPUs, cores and memory of a machine",
    "dependency": "write `after: [{workload: NAME, condition: succeeded}]`",
    "reservation": "mizzen has no reservations by name",
    "signal": "SIGTERM is sent before the end: handle it in the program",
}  # fmt: skip
SYMBOLS = ("AutoExecutor", "SlurmExecutor", "LocalExecutor", "DebugExecutor")
VARIABLES: Mapping[str, str] = {
    "SLURM_PROCID": "RANK", "SLURM_LOCALID": "LOCAL_RANK", "SLURM_NODEID": "NODE_RANK", "SLURM_NTASKS": "WORLD_SIZE",
    "SLURM_ARRAY_TASK_ID": "MIZZEN_ARRAY_INDEX", "SLURM_JOB_ID": "MIZZEN_WORKLOAD",
    "SLURM_JOB_NAME": "MIZZEN_WORKLOAD_NAME",
}  # fmt: skip
"""Variables of Slurm to those of a task with the same meaning."""
_RANKS = "read RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT from the environment"
HELPERS: Mapping[str, str] = {
    "JobEnvironment": _RANKS, "TorchDistributedEnvironment": _RANKS,
    "DelayedSubmission": "a preempted workload starts again by itself, with the same arguments",
}  # fmt: skip
"""What to use instead of submitit's own functions in a task."""
