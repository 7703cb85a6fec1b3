"""The variables that Slurm sets, and how a script gets their values from those of a mizzen task."""

import re
from collections.abc import Mapping
from typing import NamedTuple

NAME = re.compile(r"SLURM[A-Z]*_[A-Z0-9_]+")


class Variable(NamedTuple):
    """The value of a variable in a shell, and how it differs from that of Slurm."""

    value: str
    differs: str = ""


_ID = "it is the id of the workload, such as wl-..., and not a number"
_FIRST = "it has only the address of the first task's machine"
_GPUS = "$(printf %s \"${CUDA_VISIBLE_DEVICES:-}\" | tr , '\\n' | grep -c . || true)"
_OF_TASKS: Mapping[str, Variable] = {
    "SLURM_PROCID": Variable('"$RANK"'),
    "SLURM_NTASKS": Variable('"$WORLD_SIZE"'),
    "SLURM_NPROCS": Variable('"$WORLD_SIZE"'),
    "SLURM_STEP_NUM_TASKS": Variable('"$WORLD_SIZE"'),
    "SLURM_STEP_NUM_NODES": Variable('"$MIZZEN_GANG_MACHINES"'),
    "SLURM_JOB_ID": Variable('"$MIZZEN_WORKLOAD"', _ID),
    "SLURM_JOBID": Variable('"$MIZZEN_WORKLOAD"', _ID),
    "SLURM_ARRAY_JOB_ID": Variable('"$MIZZEN_WORKLOAD"', _ID),
    "SLURM_STEP_ID": Variable("0"),
    "SLURM_JOB_NAME": Variable('"$MIZZEN_WORKLOAD_NAME"'),
    "SLURM_JOB_ACCOUNT": Variable('"$MIZZEN_TENANT"', "it is the tenant"),
    "SLURM_JOB_PARTITION": Variable('"$MIZZEN_REGION"', "it is the region"),
    "SLURM_CLUSTER_NAME": Variable('"$MIZZEN_REGION"', "it is the region"),
    "SLURMD_NODENAME": Variable('"$MIZZEN_MACHINE"', "it is REGION/CLUSTER/MACHINE"),
    "SLURM_RESTART_COUNT": Variable("$((MIZZEN_ATTEMPT - 1))"),
    "SLURM_SUBMIT_DIR": Variable('"$PWD"', "it is the working directory of the task, with the files of `workdir`"),
    "SLURM_SUBMIT_HOST": Variable('"$MIZZEN_MACHINE"', "it is the machine of the task"),
    "SLURM_TMPDIR": Variable("/tmp"),
    "SLURM_JOB_NODELIST": Variable('"$MASTER_ADDR"', _FIRST),
    "SLURM_NODELIST": Variable('"$MASTER_ADDR"', _FIRST),
    "SLURM_STEP_NODELIST": Variable('"$MASTER_ADDR"', _FIRST),
    "SLURM_LAUNCH_NODE_IPADDR": Variable('"$MASTER_ADDR"'),
    "SLURM_SRUN_COMM_HOST": Variable('"$MASTER_ADDR"'),
    "SLURM_GPUS_ON_NODE": Variable(_GPUS),
    "SLURM_GPUS_PER_NODE": Variable(_GPUS),
    "SLURM_GPUS_PER_TASK": Variable(_GPUS),
    "SLURM_GPUS": Variable(_GPUS, "it is the number of GPUs of the task"),
    "SLURM_JOB_GPUS": Variable('"${CUDA_VISIBLE_DEVICES:-}"'),
    "SLURM_STEP_GPUS": Variable('"${CUDA_VISIBLE_DEVICES:-}"'),
}
_OF_EACH_TASK = ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_NNODES")
"""Variables that programs read themselves, so the script may not name them."""


def exports(
    script: str, literals: Mapping[str, str], *, is_step: bool, has_array: bool
) -> tuple[dict[str, Variable], set[str]]:
    """Return the variables that a script needs, and those in the script that have no counterpart.

    `is_step` is whether `srun` starts the programs of the script. `literals` are values that the options determine:
    they replace those of the tasks.
    """
    used = set(NAME.findall(script))
    if is_step:
        used |= {*_OF_EACH_TASK}
    if has_array:
        used.add("SLURM_ARRAY_TASK_ID")
    known = {**_OF_TASKS, **{name: Variable(value) for name, value in literals.items()}}
    own = set(re.findall(r"\b(SLURM[A-Z]*_[A-Z0-9_]+)=", script))  # The script sets these itself.
    return {name: known[name] for name in known if name in used}, used - known.keys() - own
