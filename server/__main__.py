"""`python -m server`: the same commands as `mizzen`, for the supervisor's children and where no script is installed."""

from server.commands import group

if __name__ == "__main__":
    group(prog_name="mizzen")
