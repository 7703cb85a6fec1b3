"""The wheel of the SDK has the same code as the checkout, and the documentation of what users call."""

import ast
import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType

import pytest


def _code(source: str) -> list[tuple[str, int]]:
    """Returns all statements except texts, with their lines."""
    statements = [one for one in ast.walk(ast.parse(source)) if isinstance(one, ast.stmt)]
    code = [one for one in statements if not (isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant))]
    plain = [one for one in code if not hasattr(one, "body")]
    return [(ast.dump(one), one.lineno) for one in plain] + [(type(one).__name__, one.lineno) for one in code]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """Returns the wheel."""
    checkout = Path(__file__).parents[2]
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=checkout / "sdk", check=True, capture_output=True)
    (found,) = folder.glob("*.whl")
    return zipfile.ZipFile(found)


def test_the_wheel_has_the_code_of_the_checkout(checkout: Path, wheel: zipfile.ZipFile) -> None:
    """Each module is there once, with the same statements on the same lines."""
    modules = {str(path.relative_to(checkout / "sdk")) for path in (checkout / "sdk/mizzen").rglob("*.py")}
    names = [name for name in wheel.namelist() if name.endswith(".py")]
    assert len(names) == len(set(names)) and set(names) == modules
    for name in names:
        assert _code(wheel.read(name).decode()) == _code((checkout / "sdk" / name).read_text()), name


def test_public_names_are_documented_in_the_wheel(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    """Exported classes and functions, their methods and inherited methods, and the integrations have docstrings."""
    wheel.extractall(tmp_path)
    script = """
import inspect, mizzen, mizzen.checkpoint, mizzen.notices, mizzen.cadence, mizzen.objects
for package in (mizzen, mizzen.checkpoint, mizzen.notices, mizzen.cadence, mizzen.objects):
    assert package.__file__.startswith(FOLDER)
    for name in package.__all__:
        found = getattr(package, name) if name not in ("Executor", "__version__") else None
        if not inspect.isclass(found) and not inspect.isfunction(found):
            continue
        assert found.__doc__, name
        for key, value in inspect.getmembers(found, inspect.isfunction):
            if not key.startswith("_") and value.__module__.startswith("mizzen") and inspect.isclass(found):
                assert value.__doc__, (name, key)
"""
    script = script.replace("FOLDER", repr(str(tmp_path)))
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n{script}"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    tree = ast.parse(wheel.read("mizzen/integrations/torch.py"))
    public = [one for one in tree.body if isinstance(one, ast.ClassDef) and not one.name.startswith("_")]
    assert public and ast.get_docstring(tree) and all(ast.get_docstring(one) for one in public)


def test_texts_of_internal_names_are_left_out(checkout: Path) -> None:
    """A text that is all of a body is replaced by an ellipsis; texts within strings and code stay."""
    hook = _hook(checkout)
    source = 'A = "# no comment"  # why\n\n\nclass B:\n    """Text\n    more."""\n\n\ndef c() -> None:\n    """C."""\n'
    expected = 'A = "# no comment"\n\n\nclass B:\n    ...\n\n\n\ndef c() -> None:\n    """C."""\n'
    assert hook.without_texts(source, {"c"}) == expected


def _hook(checkout: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("sdk_hatch_build", checkout / "sdk/hatch_build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
