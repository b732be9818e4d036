"""The tensors of a model's files by name, read one at a time."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import ml_dtypes  # noqa: F401  registers bfloat16 with numpy
import numpy as np

from moa_jax.errors import InputError
from moa_jax.model.convert import Packing, Shape
from moa_jax.model.quantize import Format

FLOATS = {"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"}
GGUF_INDEX, GGUF_LINK = "gguf_tensors.json", "model.gguf"  # in the folder of a GGUF file


class Stored(NamedTuple):
    """The location of a tensor in a file, and its dtype as the file spells it."""

    path: Path
    dtype: str
    start: int
    end: int


class StoredScales(NamedTuple):
    """The format of a matrix that is stored in eight bits, and the packing of its scales."""

    format: Format
    packing: Packing


class TensorReader:
    """The tensors of a model's files by name; data is read only when `read` is called."""

    scales: Mapping[str, str] = MappingProxyType({})  # names by matrix that is stored in eight bits

    def __init__(
        self, where: Path, stored: Mapping[str, Stored], shapes: Mapping[str, Shape]
    ) -> None:
        """`where` names the model in errors."""
        self._where, self._stored, self.shapes = where, stored, dict(shapes)
        self.file_of = {name: place.path for name, place in stored.items()}
        self._maps: dict[Path, np.ndarray] = {}
        self._in_files: Mapping[str, str] = {}  # names that `renamed` changed, as stored

    def renamed(self, names: Mapping[str, str]) -> TensorReader:
        """The tensors named by the keys of `names`, under the new names; others are left out.

        Errors list unexpected tensors by their names in the files.
        """
        other, named = copy.copy(self), {k: new for k, new in names.items() if k in self.shapes}
        other._stored = {new: self._stored[name] for name, new in named.items()}
        other.shapes = {new: self.shapes[name] for name, new in named.items()}
        other.file_of = {new: self.file_of[name] for name, new in named.items()}
        other._in_files = {new: self._in_files.get(name, name) for name, new in named.items()}
        return other

    def check(self, expected: Mapping[str, Shape], ignored: Iterable[str] = ()) -> None:
        """Raise InputError unless the files hold exactly the `expected` tensors, as floats.

        Tensors in `ignored` may also be present.
        """
        self._report("lacks", [name for name in expected if name not in self.shapes])
        known = set(expected) | set(ignored)
        self._report("has unexpected", [name for name in self.shapes if name not in known])
        for name, shape in expected.items():
            if self.shapes[name] != shape:
                raise InputError(
                    f"{self.file_of[name]}: {name} has shape {list(self.shapes[name])} where the "
                    f"config asks for {list(shape)}; use the config.json of these weights"
                )
            self._float_of(name)

    def read(self, name: str) -> np.ndarray:
        """One tensor; a float tensor is a view of the file, which is read on access.

        safetensors would copy the tensor, which takes as long as the rest of loading. Raises
        InputError for a file that was truncated after it was opened.
        """
        path, dtype, start, end = self._stored[name]
        if path.stat().st_size < end:  # reading the view would crash the process
            raise InputError(f"{path} ends within {name}; fetch it again")
        if path not in self._maps:
            self._maps[path] = np.asarray(np.memmap(path, np.uint8, "r"))
        content = self._maps[path][start:end]
        if dtype not in FLOATS:
            return self._other(self._in_files.get(name, name), path, content)
        return content.view(FLOATS[dtype]).reshape(self.shapes[name])

    def quantized(self, packing: Packing) -> StoredScales | None:
        """The scales of a matrix if it is stored in eight bits; `read` then gives its bytes."""
        return None

    def num_bytes(self, name: str) -> int:
        """Size in bytes of a tensor as `read` returns it."""
        _, _, start, end = self._stored[name]
        return end - start

    def stored(self, name: str) -> Stored:
        """The location of a tensor in its file."""
        return self._stored[name]

    @property
    def dtype(self) -> np.dtype:
        """The dtype of the first float tensor; raises InputError without one."""
        if not self.shapes:
            raise InputError(f"{self._where} holds no tensors; fetch it again")
        floats = (name for name in self.shapes if self._stored[name].dtype in FLOATS)
        return np.dtype(self._float_of(next(floats, next(iter(self.shapes)))))

    def _other(self, name: str, path: Path, content: np.ndarray) -> np.ndarray:
        """A tensor of a dtype outside FLOATS, by its name in the file at `path`."""
        raise NotImplementedError

    def _float_of(self, name: str) -> str:
        """The float dtype in which a tensor is read; raises InputError for other dtypes."""
        stored = self._stored[name].dtype
        if stored not in FLOATS:
            raise InputError(
                f"{self.file_of[name]}: {name} is stored as {stored}; "
                f"save it as one of {', '.join(FLOATS)}"
            )
        return FLOATS[stored]

    def _report(self, verb: str, names: list[str]) -> None:
        if names:
            shown = ", ".join(self._in_files.get(name, name) for name in names[:3])
            shown += ", ..." if len(names) > 3 else ""
            plural = "s" if len(names) > 1 else ""
            raise InputError(
                f"{self._where} {verb} {len(names)} tensor{plural} ({shown}); "
                "use the weights that belong to its config.json"
            )
