"""The executors of a file that uses submitit, with their parameters."""

import ast
from typing import Any

from mizzen_client.convert import submitit_parameters as table
from mizzen_client.convert.conversion import Conversion, shown
from mizzen_client.convert.submitit_shape import SubmititExecutor
from mizzen_client.convert.submitit_values import Constants, NotLiteral


class ExecutorReader:
    """Collects the executors of a file by the expressions that name them."""

    def __init__(self, conversion: Conversion, constants: Constants) -> None:
        """Create a reader that knows no executors yet. `constants` maps names in the file to their expressions."""
        self._conversion, self._constants = conversion, constants
        self.executors: dict[str, SubmititExecutor] = {}
        """By the text of the expression, such as `executor`."""

    def read(self, call: ast.Call, parent: ast.AST | None) -> None:
        """Read a call if it creates an executor, or changes its parameters. `parent` is the node around the call."""
        function = call.func
        kind = (
            function.attr
            if isinstance(function, ast.Attribute)
            else function.id
            if isinstance(function, ast.Name)
            else ""
        )
        if kind in table.SYMBOLS:
            name = self._target(call, parent)
            executor = self.executors[name] = SubmititExecutor(call.lineno, kind)
            for argument in call.args:
                self._conversion.dropped(
                    call.lineno, f"{kind}({shown(ast.unparse(argument))})", table.DROPPED["folder"]
                )
            self._keep(executor, call)
        elif kind == "update_parameters" and isinstance(function, ast.Attribute):
            owner = ast.unparse(function.value)
            if owner not in self.executors:
                self.executors[owner] = SubmititExecutor(call.lineno, "AutoExecutor")
            self._keep(self.executors[owner], call)

    def _target(self, call: ast.Call, parent: ast.AST | None) -> str:
        if isinstance(parent, ast.Assign) and len(parent.targets) == 1:
            return ast.unparse(parent.targets[0])
        if isinstance(parent, ast.withitem) and parent.optional_vars is not None:
            return ast.unparse(parent.optional_vars)
        if isinstance(parent, ast.AnnAssign):
            return ast.unparse(parent.target)
        return ast.unparse(call)

    def _keep(self, executor: SubmititExecutor, call: ast.Call) -> None:
        for keyword in call.keywords:
            line = keyword.value.lineno
            pairs: list[tuple[str, Any]]
            try:
                value = self._constants.value(keyword.value)
            except NotLiteral as error:
                source = f"{keyword.arg or '**'}={shown(ast.unparse(keyword.value), 40)}"
                plain = (keyword.arg or "").removeprefix("slurm_")
                if plain in table.DROPPED:
                    self._conversion.dropped(line, source, table.DROPPED[plain])
                else:
                    self._conversion.lost(line, source, f"{error}: write the value into the document")
                continue
            pairs = [(keyword.arg, value)] if keyword.arg else list(value.items()) if isinstance(value, dict) else []
            for name, given in pairs:
                self.parameter(executor, line, str(name), given)

    def parameter(self, executor: SubmititExecutor, line: int, name: str, value: Any) -> None:
        """Add a parameter to an executor, or note why it is not needed or has no counterpart."""
        plain = name.removeprefix("slurm_")
        plain = table.SLURM_NAMES.get(plain, plain)
        source = f"{name}={shown(repr(value), 40)}"
        if name.startswith(("local_", "debug_")):
            self._conversion.dropped(line, source, "it concerns submitit's local executors only")
        elif plain == "additional_parameters" and isinstance(value, dict):
            for key, inner in value.items():
                self.parameter(executor, line, f"slurm_{str(key).replace('-', '_')}", inner)
        elif plain in table.READ:
            if plain in executor.parameters:
                before = executor.parameters[plain]
                self._conversion.dropped(
                    before[0], f"{before[1]}={shown(repr(before[2]), 40)}", f"line {line} gives it again"
                )
            executor.parameters[plain] = (line, name, value)
        elif plain in table.DROPPED:
            self._conversion.dropped(line, source, table.DROPPED[plain])
        else:
            why = table.LOST.get(plain, "`mizzen convert` does not know this parameter; check its spelling")
            self._conversion.lost(line, source, why)
