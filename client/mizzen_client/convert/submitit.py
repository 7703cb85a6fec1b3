"""Converts Python files that submit functions with submitit. The file is parsed and never executed."""

import ast
import re
import warnings
from collections.abc import Iterator, Sized
from dataclasses import replace
from math import prod
from pathlib import PurePath
from typing import Any

from mizzen_client.convert import submitit_parameters as table
from mizzen_client.convert.conversion import (
    CannotConvert,
    Carryover,
    Conversion,
    Remark,
    fitting_name,
    shown,
)
from mizzen_client.convert.submitit_executors import ExecutorReader
from mizzen_client.convert.submitit_shape import ExecutorShape, SubmititExecutor
from mizzen_client.convert.submitit_values import NotLiteral, constants_of
from mizzen_client.documents import without_empty

_RESULTS = ("result", "results", "wait", "done", "exception", "exceptions", "stdout", "stderr", "cancel", "get_info",
            "awaitable", "watcher")  # fmt: skip
_MOST_ELEMENTS = 100_000
_MODULE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def convert(text: str, name: str) -> Conversion:
    """Convert the Python file `text`; `name` is that of its file, without the folder.

    Raises:
        CannotConvert: see the message.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Warnings of the compiler about the file are not about the conversion.
            tree = ast.parse(text)
    except SyntaxError as error:
        raise CannotConvert(error.lineno or 1, f"not Python: {error.msg}") from None
    except (ValueError, RecursionError, MemoryError) as error:
        raise CannotConvert(1, f"not Python: {type(error).__name__}: nested too deeply, or with null bytes") from None
    try:
        return _Program(tree, name).convert()
    except RecursionError:
        raise CannotConvert(1, "an expression is nested too deeply") from None


class _Program:
    def __init__(self, tree: ast.Module, name: str) -> None:
        self._tree, self._conversion = tree, Conversion("submitit")
        self._module = PurePath(name).stem
        self._default = fitting_name(self._module)
        self._constants = constants_of(tree)
        self._reader = ExecutorReader(self._conversion, self._constants)
        self._executors = self._reader.executors
        self._imports: dict[str, str] = {}
        self._parents = {child: node for node in ast.walk(tree) for child in ast.iter_child_nodes(node)}

    def convert(self) -> Conversion:
        self._read_imports()
        calls = sorted(self._calls(), key=lambda call: (call.lineno, call.col_offset))
        for call in calls:
            self._reader.read(call, self._parents.get(call))
        submissions = [call for call in calls if self._is_submission(call)]
        if not submissions:
            raise CannotConvert(1, "no executor.submit(...) and no executor.map_array(...): nothing is submitted")
        for call in submissions:
            self._submission(call, len(submissions))
        self._results(calls)
        self._note_import()
        self._rest(submissions)
        return self._conversion

    def _calls(self) -> Iterator[ast.Call]:
        return (node for node in ast.walk(self._tree) if isinstance(node, ast.Call))

    def _read_imports(self) -> None:
        for node in ast.walk(self._tree):
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                for alias in node.names:
                    self._imports[alias.asname or alias.name] = f"from {node.module} import {ast.unparse(alias)}"
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    self._imports[alias.asname or alias.name.partition(".")[0]] = f"import {ast.unparse(alias)}"
            if isinstance(node, ast.ClassDef) and any("submitit." in ast.unparse(base) for base in node.bases):
                why = "tasks import it, and have no submitit: derive it from object, or install submitit in `setup`"
                self._conversion.lost(node.lineno, f"class {node.name}", why)

    def _is_submission(self, call: ast.Call) -> bool:
        function = call.func
        if not isinstance(function, ast.Attribute) or function.attr not in ("submit", "map_array", "submit_array"):
            return False
        owner = ast.unparse(function.value)
        return owner in self._executors or function.attr == "map_array" or "executor" in owner.lower()

    def _submission(self, call: ast.Call, of: int) -> None:
        assert isinstance(call.func, ast.Attribute)
        owner = ast.unparse(call.func.value)
        executor = self._executors.get(owner) or (
            next(iter(self._executors.values()))
            if len(self._executors) == 1
            else SubmititExecutor(call.lineno, "AutoExecutor")
        )
        if not call.args or any(isinstance(one, ast.Starred) for one in call.args):
            raise CannotConvert(
                call.lineno, f"{shown(ast.unparse(call))}: the function and its arguments must be written out"
            )
        if call.func.attr == "submit_array":
            raise CannotConvert(call.lineno, "submit_array: write executor.map_array(function, values)")
        number = len(self._conversion.documents) + 1
        function, setup = self._function(call, call.args[0])
        array: dict[str, Any] | None
        if call.func.attr == "map_array":
            script, array = self._map(call, function)
        else:
            script, array = self._submit(call, function)
        document = self._document(executor, number if of > 1 else 0, call, array)
        document["jobs"][0]["run"] = f"#!/usr/bin/env python3\n{_START}{self._slurm()}{setup}\n{script}\n"
        self._conversion.documents.append(document)

    def _note_import(self) -> None:
        """Remark on `import submitit`, which tasks execute if they import the file."""
        imports_file = any(_STAND_IN in one["jobs"][0]["run"] for one in self._conversion.documents)
        for node in ast.walk(self._tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)) and "submitit" in ast.unparse(node):
                source = shown(ast.unparse(node))
                if imports_file:
                    why = (
                        "tasks import this file; an empty module takes the place of submitit where it is not installed"
                    )
                    self._conversion.changed(node.lineno, source, "jobs[0].run", why)
                else:
                    self._conversion.dropped(node.lineno, source, "mizzen needs no submitit")

    def _slurm(self) -> str:
        """Return the assignments of Slurm's variables that the file reads."""
        lines = {}
        for node in ast.walk(self._tree):
            name = node.value if isinstance(node, ast.Constant) else None
            if isinstance(node, ast.Constant) and isinstance(name, str) and re.fullmatch("SLURM_[A-Z_]+", name):
                if name in table.VARIABLES:
                    lines[name] = f'os.environ["{name}"] = os.environ.get("{table.VARIABLES[name]}", "")\n'
                    self._conversion.carried(node.lineno, name, "jobs[0].run")
                else:
                    self._conversion.lost(node.lineno, name, "mizzen has no such value: write it into `env`")
        return "".join(lines.values())

    def _function(self, call: ast.Call, node: ast.expr) -> tuple[str, str]:
        """Return an expression for the called function, and the imports that it needs."""
        root: ast.expr = node
        while isinstance(root, (ast.Attribute, ast.Call)):
            root = root.value if isinstance(root, ast.Attribute) else root.func
        if not isinstance(root, ast.Name):
            raise CannotConvert(
                call.lineno, f"{shown(ast.unparse(node))}: only functions with a name can be imported; write a def"
            )
        if isinstance(node, ast.Call):
            self._conversion.changed(
                node.lineno, shown(ast.unparse(node)), "jobs[0].run", "each attempt creates the object again"
            )
        elif root.id in self._constants.named and not self._is_defined(root.id):
            value = self._constants.named[root.id]
            if not isinstance(value, ast.Call):
                raise CannotConvert(call.lineno, f"{root.id}: only functions with a name can be imported; write a def")
            return self._function(call, value)
        if root.id in self._imports:
            return ast.unparse(self._resolved(node)), self._imports[root.id]
        if not self._is_defined(root.id):
            raise CannotConvert(call.lineno, f"{root.id}: is neither defined nor imported in this file")
        if not _MODULE.fullmatch(self._module):
            raise CannotConvert(
                call.lineno, f"{self._module}.py cannot be imported: rename the file, with letters, digits and _"
            )
        if self._runs_at_import(call):
            message = f"tasks import {root.id} from {self._module}.py, and this line would submit again"
            raise CannotConvert(call.lineno, f'{message}: put it below `if __name__ == "__main__":`')
        return ast.unparse(self._resolved(node)), f"{_STAND_IN}from {self._module} import {root.id}"

    def _resolved(self, node: ast.expr) -> ast.expr:
        """Replace names of literals in the arguments of a call."""
        if not isinstance(node, ast.Call):
            return node
        arguments = [self._literal(node, one) for one in node.args]
        keywords = [ast.keyword(one.arg, self._literal(node, one.value)) for one in node.keywords]
        return ast.Call(node.func, arguments, keywords)

    def _literal(self, call: ast.Call, node: ast.expr) -> ast.expr:
        try:
            return ast.parse(self._constants.expression(node), mode="eval").body
        except NotLiteral as error:
            message = (
                f"{shown(ast.unparse(call))}: {error}; write the arguments as literals, or compute them in the function"
            )
            raise CannotConvert(node.lineno, message) from None

    def _is_defined(self, name: str) -> bool:
        kinds = (ast.FunctionDef, ast.ClassDef)
        return any(isinstance(node, kinds) and node.name == name for node in self._tree.body)

    def _runs_at_import(self, node: ast.AST) -> bool:
        while (parent := self._parents.get(node)) is not None:
            if isinstance(parent, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
                return False
            if isinstance(parent, ast.If) and "__name__" in ast.unparse(parent.test):
                return False
            node = parent
        return True

    def _submit(self, call: ast.Call, function: str) -> tuple[str, dict[str, Any] | None]:
        loops = self._loops(call)
        names = [name for loop in loops for name in self._targets(loop)]
        arguments = [self._in_loop(one, names) for one in call.args[1:]]
        for one in call.keywords:
            text = self._in_loop(one.value, names)
            arguments.append(f"{one.arg}={text}" if one.arg else f"**{text}")
        last = f"{function}({', '.join(arguments)})"
        if not loops:
            self._conversion.carried(call.lineno, shown(ast.unparse(call)), "jobs[0].run")
            return last, None
        count = prod(len(self._values(loop)) for loop in loops)
        if not 1 <= count <= _MOST_ELEMENTS:
            raise CannotConvert(loops[0].lineno, f"the loop submits {count} calls; an array has 1 to {_MOST_ELEMENTS}")
        why = "the calls of the loop are the elements of an array"
        self._conversion.changed(call.lineno, shown(ast.unparse(call)), "array", why)
        lists = " ".join(f"for {ast.unparse(loop.target)} in {self._text(loop.iter)}" for loop in loops)
        pattern = f"({names[0]},)" if len(names) == 1 else f"({', '.join(names)})"
        return f"{pattern} = [{pattern} {lists}][{_INDEX}]\n{last}", {"indexes": f"0-{count - 1}"}

    def _loops(self, call: ast.Call) -> list[ast.For]:
        """Return the loops around a call, from the outer one."""
        node: ast.AST = call
        found: list[ast.For] = []
        while (parent := self._parents.get(node)) is not None and not isinstance(parent, (ast.FunctionDef, ast.Module)):
            if isinstance(parent, (ast.ListComp, ast.GeneratorExp)):
                if any(one.ifs for one in parent.generators):
                    raise CannotConvert(call.lineno, "a condition around a submission cannot be read: write one list")
                loops = [
                    ast.For(one.target, one.iter, [], [], lineno=parent.lineno, col_offset=0)
                    for one in parent.generators
                ]
                found = [*loops, *found]
            elif isinstance(parent, ast.For):
                found.insert(0, parent)
            elif isinstance(parent, ast.While) or (
                isinstance(parent, ast.If) and "__name__" not in ast.unparse(parent.test)
            ):
                raise CannotConvert(parent.lineno, "a condition around a submission cannot be read: submit without it")
            node = parent
        return found

    def _targets(self, loop: ast.For) -> list[str]:
        """Return the names of a loop's variables."""
        names = [one for one in ast.walk(loop.target) if isinstance(one, ast.Name)]
        if not all(isinstance(one, (ast.Name, ast.Tuple, ast.List, ast.expr_context)) for one in ast.walk(loop.target)):
            raise CannotConvert(loop.lineno, "the variables of a loop around a submission must be names")
        return [one.id for one in names]

    def _values(self, loop: ast.For) -> Sized:
        self._text(loop.iter)  # An error names the line.
        values = self._constants.value(loop.iter)
        if not isinstance(values, (list, tuple, range)):
            raise CannotConvert(loop.lineno, f"{shown(ast.unparse(loop.iter))}: must be a list or a range")
        return values

    def _in_loop(self, node: ast.expr, names: list[str]) -> str:
        used = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
        if used & {*names} and not used - {*names, "str", "int", "float"}:
            return ast.unparse(node)
        return self._text(node)

    def _map(self, call: ast.Call, function: str) -> tuple[str, dict[str, Any]]:
        lists = [self._text(one) for one in call.args[1:]]
        values = [self._constants.value(one) for one in call.args[1:]]
        if not values or any(not isinstance(one, (list, tuple, range)) for one in values):
            raise CannotConvert(call.lineno, f"{shown(ast.unparse(call))}: needs at least one list of arguments")
        count = min(len(one) for one in values)
        if count == 0:
            raise CannotConvert(call.lineno, f"{shown(ast.unparse(call))}: a list of arguments is empty")
        self._conversion.carried(call.lineno, shown(ast.unparse(call)), "array")
        lines = f"arguments = list(zip({', '.join(lists)}))[{_INDEX}]\n{function}(*arguments)"
        return lines, {"indexes": f"0-{count - 1}"}

    def _text(self, node: ast.expr) -> str:
        try:
            return self._constants.expression(node)
        except NotLiteral as error:
            message = f"{error}; the file is not run, so write the values as a list, a range or a number"
            raise CannotConvert(node.lineno, message) from None

    def _document(
        self, executor: SubmititExecutor, number: int, call: ast.Call, array: dict[str, Any] | None
    ) -> dict[str, Any]:
        shape = ExecutorShape(self._conversion, executor)
        name = shape.name(self._default, number)
        if array is not None:
            array = {**array, **shape.throttle()}
        elif "array_parallelism" in executor.parameters:
            shape.drop("array_parallelism", "nothing here is an array")
        why = "the files of this folder are copied to each task; changes and results stay there: write them to a bucket"
        self._conversion.changed(call.lineno, "the working directory", "workdir", why)
        job = {"name": "main", "tasks": shape.tasks(), "resources": shape.resources(), "setup": shape.setup()}
        return without_empty({
            "version": 1, "name": name, "workdir": ".", "array": array, "checkpoint": shape.notice(),
            "limits": shape.limits(), "jobs": [without_empty(job)],
        })  # fmt: skip

    def _results(self, calls: list[ast.Call]) -> None:
        for call in calls:
            function = call.func
            if not isinstance(function, ast.Attribute):
                continue
            if function.attr in ("result", "results") or (
                function.attr in _RESULTS and self._is_of_job(function.value)
            ):
                why = "a workload returns no value: let the function write it to a bucket; `mizzen wait NAME` waits"
                self._conversion.lost(call.lineno, shown(ast.unparse(call)), why)
            elif (
                re.fullmatch(r"submitit\.(helpers\.)?\w+", ast.unparse(function)) and function.attr not in table.SYMBOLS
            ):
                self._helper(call, function.attr)
            elif function.attr == "batch":
                self._conversion.changed(call.lineno, shown(ast.unparse(call)), "array", "a loop in it is an array")
        for node in ast.walk(self._tree):
            if isinstance(node, ast.FunctionDef) and node.name == "checkpoint":
                why = "it is not called: save and load with mizzen's library, or when SIGTERM arrives"
                self._conversion.lost(node.lineno, "def checkpoint", why)

    def _helper(self, call: ast.Call, name: str) -> None:
        if name == "monitor_jobs":
            self._conversion.dropped(call.lineno, shown(ast.unparse(call)), "use `mizzen wait NAME`")
        else:
            why = table.HELPERS.get(name, "it needs submitit and Slurm in the task: leave it out")
            self._conversion.lost(call.lineno, shown(ast.unparse(call)), why)

    def _rest(self, submissions: list[ast.Call]) -> None:
        """Remark on the other statements: those around the submissions, and those that tasks import."""
        noted = {remark.line for remark in self._conversion.remarks}
        around = [parent for call in submissions for parent in self._around(call)]
        for block in dict.fromkeys(around):
            for node in block.body if isinstance(block, (ast.If, ast.FunctionDef)) else ():
                if not noted & {*range(node.lineno, (node.end_lineno or node.lineno) + 1)}:
                    is_value = isinstance(node, (ast.Assign, ast.AnnAssign))
                    why = "it is not run, and its value is copied where it is used" if is_value else "it is not run"
                    self._conversion.dropped(
                        node.lineno, shown(ast.unparse(node)), f"{why}: tasks run the function only"
                    )
        for node in self._tree.body:
            if node not in around and node.lineno not in noted:
                first = Remark(node.lineno, shown(ast.unparse(node).partition("\n")[0]), Carryover.CARRIED, "workdir")
                last = node.end_lineno if node.end_lineno != node.lineno else None
                self._conversion.remarks.append(replace(first, last_line=last))

    def _around(self, node: ast.AST) -> list[ast.AST]:
        """Return the blocks that contain a submission, innermost first."""
        found: list[ast.AST] = []
        while (parent := self._parents.get(node)) is not None:
            if isinstance(parent, (ast.If, ast.FunctionDef)):
                found.append(parent)
            node = parent
        return found

    def _is_of_job(self, node: ast.expr) -> bool:
        return bool(re.search(r"\bjobs?\b|_job|future", ast.unparse(node))) or any(
            isinstance(one, ast.Call) and self._is_submission(one) for one in ast.walk(node)
        )


_INDEX = 'int(os.environ["MIZZEN_ARRAY_INDEX"])'
_STAND_IN = """\
try:
    import submitit
except ModuleNotFoundError:
    sys.modules["submitit"] = type(sys)("submitit")
"""
_START = "import os\nimport sys\n\nsys.path.insert(0, os.getcwd())\n"
