import submitit


def process(path: str, shard: int, of: int = 16) -> None:
    print(path, shard, of)


if __name__ == "__main__":
    ex = submitit.AutoExecutor("logs", cluster="slurm")
    ex.update_parameters(cpus_per_task=2, mem_gb=4, timeout_min=30, name="process")
    jobs = []
    with ex.batch():
        for shard in range(16):
            job = ex.submit(process, "s3://bucket/in", shard, of=16)
            jobs.append(job)
    submitit.helpers.monitor_jobs(jobs)
