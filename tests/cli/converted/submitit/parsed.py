import argparse

import submitit


def main(rate, decay):
    print(rate, decay)


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--partition", default="gpu")
    return parser.parse_args()


def launch():
    args = parse()
    executor = submitit.AutoExecutor(folder="logs")
    executor.update_parameters(
        slurm_partition=args.partition, timeout_min=args.minutes, gpus_per_node=2, tasks_per_node=1, mem_gb=20.5,
    )
    for rate, decay in [(0.1, 0.0), (0.2, -0.5)]:
        executor.submit(main, rate, decay)


if __name__ == "__main__":
    launch()
