"""Functions take values rather than long lists of positional arguments."""

import ast

from tests.infra.test_names import ROOT, files

_MOST = 8
_KERNELS = {
    "tetris/kernels/moves.py: _flow": "innermost loop: taking an array from a tuple counts references",
    "tetris/kernels/moves.py: job_at": "innermost loop: taking an array from a tuple counts references",
}


def test_functions_have_few_positional_arguments() -> None:
    long = set()
    for path in files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names = [arg.arg for arg in node.args.posonlyargs + node.args.args]
                if len(names) - (names[:1] in (["self"], ["cls"])) > _MOST:
                    long.add(f"{path.relative_to(ROOT)}: {node.name}")
    assert long == _KERNELS.keys()
