"""Makes mizzen's SDK available to the Python of an image that has no mizzen. Mounted into containers.

Python imports `sitecustomize` at its start; this file is found by PYTHONPATH. It then runs that of the image, if any.
"""

import importlib.util
import sys
from importlib.machinery import PathFinder
from pathlib import Path

_HERE = Path(__file__).parent
sys.path[:] = [path for path in sys.path if path != str(_HERE)]
if PathFinder.find_spec("mizzen") is None:
    sys.path.append(str(_HERE.parent / "sdk"))
_found = PathFinder.find_spec("sitecustomize")  # Not `find_spec` of importlib, which returns this module.
if _found is not None and _found.loader is not None:
    _found.loader.exec_module(importlib.util.module_from_spec(_found))
