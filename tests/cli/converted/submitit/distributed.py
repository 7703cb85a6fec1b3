import os

import submitit


def run():
    env = submitit.JobEnvironment()
    os.environ["MASTER_PORT"] = "29500"
    print(env.global_rank, os.environ["SLURM_PROCID"], os.environ["SLURM_JOB_NODELIST"])


if __name__ == "__main__":
    executor = submitit.AutoExecutor(folder="logs", slurm_max_num_timeout=20)
    executor.update_parameters(
        nodes=4, tasks_per_node=8, gpus_per_node=8, cpus_per_task=10, mem_gb=480, timeout_min=2880,
        slurm_signal_delay_s=120, slurm_additional_parameters={"qos": "high", "exclusive": True, "gres": "gpu:a100:8"},
    )
    executor.submit(run)
