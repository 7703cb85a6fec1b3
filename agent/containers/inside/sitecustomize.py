"""Makes mizzen's SDK available to the Python of an image that has no mizzen. Mounted into containers.

Python imports `sitecustomize` at its start; this file is found by PYTHONPATH. It then runs that of the image, if any.
"""

import importlib
import importlib.util
import sys
from pathlib import Path

_HERE = Path(__file__).parent
sys.path[:] = [path for path in sys.path if path != str(_HERE)]
if importlib.util.find_spec("mizzen") is None:
    sys.path.append(str(_HERE.parent / "sdk"))
del sys.modules["sitecustomize"]
if importlib.util.find_spec("sitecustomize") is not None:
    importlib.import_module("sitecustomize")
