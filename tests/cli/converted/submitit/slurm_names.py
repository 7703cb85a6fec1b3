import submitit
from work import step

if __name__ == "__main__":
    executor = submitit.SlurmExecutor(folder="logs", max_num_timeout=3)
    executor.update_parameters(
        time=90,
        job_name="step",
        partition="cpu",
        ntasks_per_node=4,
        cpus_per_task=2,
        mem="16GB",
        array_parallelism=10,
        dependency="afterok:123",
        setup=["export OMP_NUM_THREADS=2", "module load gcc"],
        mail_type="END",
    )
    executor.map_array(step, ["a", "b", "c"])
