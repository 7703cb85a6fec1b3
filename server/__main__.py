"""`python -m server`: the server's commands, including `agents`, which only the embedded stack starts."""

from server.commands import group

if __name__ == "__main__":
    group(prog_name="mizzen")
