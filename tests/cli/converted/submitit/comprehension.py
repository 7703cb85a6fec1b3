"""Submits one job for each seed."""
import submitit
import experiments.seeds as seeds

if __name__ == "__main__":
    executor = submitit.AutoExecutor(folder="logs")
    executor.update_parameters(slurm_gpus_per_task=1, slurm_cpus_per_task=4, slurm_mem_per_gpu="40G", slurm_time=120)
    jobs = [executor.submit(seeds.run, seed, name="fixed") for seed in (1, 2, 3, 5, 8)]
    outputs = [job.result() for job in jobs]
