import submitit


class Trainer:
    def __init__(self, lr, epochs=10):
        self.lr, self.epochs = lr, epochs

    def __call__(self):
        print("trains", self.lr, self.epochs)

    def checkpoint(self):
        return submitit.helpers.DelayedSubmission(self)


if __name__ == "__main__":
    executor = submitit.AutoExecutor(folder="checkpoints")
    executor.update_parameters(gpus_per_node="v100:2", cpus_per_task=8, mem_gb=64, timeout_min=240, name="trainer")
    trainer = Trainer(0.01, epochs=90)
    job = executor.submit(trainer)
    print(f"Submitted {job.job_id}")
