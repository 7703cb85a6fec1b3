"""`python -m server`: the server's commands, including `agents`, which only the embedded stack starts."""

from server.balance_commands import balance
from server.commands import group

group.add_command(balance)

if __name__ == "__main__":
    group(prog_name="mizzen")
