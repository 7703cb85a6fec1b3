"""Leaves comments and the docstrings of internal names out of the wheel, of which they are a quarter.

Names that a package exports, public names of the integrations, and their public methods keep their docstrings. Lines
keep their numbers, so tracebacks lead to the same lines in the checkout.
"""

import ast
import io
import tempfile
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class DocstringHook(BuildHookInterface[Any]):
    """Exchanges the modules of a wheel. An editable install uses those of the checkout."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """See `BuildHookInterface`."""
        if version == "editable":
            return
        root = Path(self.root)
        modules = sorted((root / "mizzen").rglob("*.py"))
        exported = exported_names(modules)
        self._made = tempfile.TemporaryDirectory()
        for number, path in enumerate(modules):
            if path.name in ("__init__.py", "__main__.py"):
                continue
            made = Path(self._made.name, f"{number}.py")
            made.write_text(without_texts(path.read_text(), None if "integrations" in path.parts else exported))
            build_data["force_include"][str(made)] = str(path.relative_to(root))

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """See `BuildHookInterface`."""
        if version != "editable":
            self._made.cleanup()


def without_texts(source: str, exported: set[str] | None) -> str:
    """Return a module without comments and without the docstrings of names that are not `exported`.

    The code keeps its lines. `exported` is None if all public names of the module are, and its own text, too.
    """
    lines = source.split("\n")
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line, column = token.start
            lines[line - 1] = lines[line - 1][:column].rstrip()
    for found, alone in _docstrings(ast.parse(source), exported, exported is None):
        begin = len(lines[found.lineno - 1].encode()[: found.col_offset].decode())
        first = lines[found.lineno - 1][:begin]
        rest = lines[found.end_lineno - 1].encode()[found.end_col_offset :].decode()  # type: ignore[operator]
        lines[found.lineno - 1 : found.end_lineno] = [""] * (found.end_lineno - found.lineno + 1)  # type: ignore[operator]
        lines[found.lineno - 1] = (first + "..." * alone + rest).rstrip()
    return "\n".join(lines)


def _docstrings(node: Any, exported: set[str] | None, is_public: bool) -> Iterator[tuple[ast.Expr, bool]]:
    """Yield the texts to leave out, and whether each is all that its class or function contains."""
    for one in node.body:
        if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant) and isinstance(one.value.value, str):
            if not is_public or _is_hidden(node, one):
                yield one, len(node.body) == 1 and not isinstance(node, ast.Module)
        elif isinstance(one, ast.ClassDef | ast.FunctionDef):
            known = exported is None or one.name in exported if isinstance(node, ast.Module) else is_public
            hidden = one.name.startswith("_") or isinstance(node, ast.FunctionDef)
            yield from _docstrings(one, exported, known and not hidden)


def _is_hidden(node: Any, text: ast.Expr) -> bool:
    """Return whether a text describes a private attribute, to which a value is assigned before it."""
    before = node.body[node.body.index(text) - 1]
    targets = before.targets if isinstance(before, ast.Assign) else [getattr(before, "target", None)]
    return text is not node.body[0] and (ast.unparse(targets[0]) if targets[0] else "").split(".")[-1].startswith("_")


def exported_names(modules: list[Path]) -> set[str]:
    """Return all names that packages mention or export, and those of the base classes of exported classes."""
    trees = {path: ast.parse(path.read_text()) for path in modules}
    found: set[str] = set()
    for path, tree in trees.items():
        if path.name == "__init__.py":
            found.update(str(one.value) for one in ast.walk(tree) if isinstance(one, ast.Constant))
            found.update(one.name for one in ast.walk(tree) if isinstance(one, ast.alias))
    classes = [one for tree in trees.values() for one in tree.body if isinstance(one, ast.ClassDef)]
    size = 0
    while size != len(found):
        size = len(found)
        found.update(ast.unparse(base) for one in classes if one.name in found for base in one.bases)
    return found
