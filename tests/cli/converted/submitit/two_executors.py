import submitit
from pipeline import evaluate, prepare

if __name__ == "__main__":
    cpu = submitit.AutoExecutor(folder="logs/cpu")
    cpu.update_parameters(cpus_per_task=16, mem_gb=64, timeout_min=60, name="prepare")
    gpu = submitit.AutoExecutor(folder="logs/gpu")
    gpu.update_parameters(gpus_per_node=1, slurm_constraint="bigmem", mem_gb=64, timeout_min=60, name="evaluate")
    first = cpu.submit(prepare, {"corpus": "en", "parts": [1, 2]})
    first.wait()
    gpu.submit(evaluate, "en", top=5)
