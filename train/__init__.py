"""Programs that train targets and drafters: `python -m train.NAME --help`."""

import importlib.util
import sys
from pathlib import Path

if sys.argv[0] == "-m":  # `python -m` is looking up the program, which imports infer
    _found = importlib.util.find_spec("infer")
    _folders = (_found and _found.submodule_search_locations) or ()
    _places = [Path(folder).resolve() for folder in _folders]
    if Path(__file__).resolve().parents[1] / "infer" not in _places:
        _what = (_found and _found.origin) or ", ".join(map(str, _places)) or "nothing"
        _line = f"{_what} shadows infer of moa-jax; start moa-distill, ... instead of -m train..."
        sys.stderr.write(f"train: {_line}\n")
        sys.exit(2)
