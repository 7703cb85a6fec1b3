import submitit


def add(a, b):
    return a + b


if __name__ == "__main__":
    executor = submitit.AutoExecutor(folder="log_test")
    executor.update_parameters(timeout_min=1, slurm_partition="dev")
    job = executor.submit(add, 5, 7)
    print(job.job_id)
    output = job.result()
    assert output == 12
