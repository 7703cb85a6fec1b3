import submitit

from project.training import train

LRS = [0.1, 0.01, 0.001, 0.0001]


def main():
    executor = submitit.AutoExecutor(folder="logs/%j")
    executor.update_parameters(
        name="grid",
        gpus_per_node=1,
        cpus_per_task=8,
        mem_gb=32,
        timeout_min=60 * 6,
        slurm_array_parallelism=2,
        slurm_constraint="a100|h100",
    )
    jobs = executor.map_array(train, LRS, range(4))
    return [job.result() for job in jobs]


if __name__ == "__main__":
    main()
