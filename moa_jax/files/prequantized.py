"""Folders whose matrices are stored in eight bits: compressed-tensors, and FP8 as Qwen writes it.

    NAME.weight            (out, in) int8 or float8_e4m3fn
    NAME.weight_packed     (out, in / 4) int32 instead: four int8, each plus 128, lowest byte first
    NAME.weight_scale      (1,), (out, 1), (out, groups of inputs), or one scale per block of
                           outputs and inputs
    NAME.weight_scale_inv  the same in FP8 folders; also a factor, despite its name

The stored values are kept, so that no matrix is wide in memory. They are weights only: scales of
activations and of caches, which some folders also hold, are not read. Matrices of a folder that
are stored as floats, such as an ignored `lm_head`, are read as in any other folder.

References: compressed-tensors, quant_config.py and compressors; DeepSeek-V3 for blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from moa_jax.errors import InputError
from moa_jax.files.config_keys import shown
from moa_jax.files.tensor_reader import StoredScales, TensorReader
from moa_jax.model.convert import Packing, Shape
from moa_jax.model.quantize import Format

KEYS = ("quantization_config", "compression_config")
_FORMATS: dict[str, Format] = {"I8": "int8", "I32": "int8", "F8_E4M3": "fp8"}  # by stored dtype
_LAYOUTS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
READ = ("fp8", *(f"compressed-tensors {layout}" for layout in _LAYOUTS))  # methods and formats
_STRATEGIES = ("tensor", "channel", "group", "block")
_SCALES = ("weight_scale", "weight_scale_inv")
# Symmetric weights have no zero points; the other tensors are those of activations and caches.
_UNREAD = """
    weight_shape weight_zero_point input_scale input_zero_point output_scale output_zero_point
    activation_scale k_scale v_scale k_zero_point v_zero_point
""".split()


class Scheme(NamedTuple):
    """The outputs and the inputs that share a scale, as config.json states them.

    One scale per matrix or per output need not be stated.
    """

    blocks: tuple[tuple[int, int], ...]


def scheme_of(config: Mapping[str, Any], where: str) -> Scheme | None:
    """The scheme of a config.json, None for unquantized weights; InputError for other formats."""
    stated = next((config[key] for key in KEYS if config.get(key)), None)
    if stated is None:
        return None
    method = stated.get("quant_method") if isinstance(stated, dict) else None
    if method == "fp8":
        block, form = stated.get("weight_block_size"), stated.get("fmt") or "e4m3"
        if form != "e4m3":
            raise _unread(where, f"FP8 in the format {shown(form)}")
        return Scheme(() if block is None else (_sizes(block, "weight_block_size", where),))
    if method != "compressed-tensors":
        raise _unread(where, shown(method or stated))
    return Scheme(tuple(_blocks(stated, where)))


def _blocks(stated: Mapping[str, Any], where: str) -> Iterator[tuple[int, int]]:
    """Yield the outputs and inputs of a scale, of groups that have more than one per output."""
    sparsity, transform = (stated.get(f"{key}_config") or {} for key in ("sparsity", "transform"))
    if sparsity.get("format", "dense") != "dense" or transform.get("config_groups"):
        raise _unread(where, "compressed-tensors with sparsity or transforms")
    for group in stated["config_groups"].values():
        weights, layout = group["weights"], group.get("format") or stated.get("format")
        if weights is None:  # activations alone
            continue
        bits, strategy = weights.get("num_bits", 8), weights.get("strategy")
        size, activations = weights.get("group_size"), group.get("input_activations") or {}
        scheme = f"W{bits}A{activations.get('num_bits', 16)} ({layout})"
        if bits != 8 or layout not in _LAYOUTS:
            raise _unread(where, scheme)
        if not weights.get("symmetric", True):
            raise _unread(where, f"{scheme} with zero points")
        if weights.get("actorder") in (True, "group", "dynamic"):
            raise _unread(where, f"{scheme} with inputs in another order (actorder)")
        if strategy not in (None, *_STRATEGIES):
            raise _unread(where, f"{scheme} with the strategy {shown(strategy)}")
        if strategy == "group" or (strategy is None and size not in (None, -1)):
            yield 1, *_sizes(size, "group_size", where)
        elif strategy == "block":
            yield _sizes(weights.get("block_structure"), "block_structure", where)


def _sizes(given: Any, key: str, where: str) -> tuple[int, ...]:
    sizes = tuple(given) if isinstance(given, list) else (given,)
    if len(sizes) != (1 if key == "group_size" else 2) or any(
        type(size) is not int or size < 1 for size in sizes
    ):
        raise InputError(
            f"{where}: quantization_config: {key}: {shown(given)} does not say which weights "
            "share a scale; use the config.json that came with the model"
        )
    return sizes


def _unread(where: str, what: str) -> InputError:
    return InputError(
        f"{where}: quantization_config: {what} is not read; use a quantized folder of 8 bits by "
        "compressed-tensors (W8A16, W8A8, FP8), or the unquantized model and --weights"
    )


def reader_of(reader: TensorReader, config: Mapping[str, Any], path: Path) -> TensorReader:
    """A reader of a folder's tensors by its config.json at `path`; unchanged if unquantized."""
    scheme = scheme_of(config, str(path))
    return reader if scheme is None else PrequantizedReader(reader, scheme, path.parent)


class PrequantizedReader(TensorReader):
    """The tensors of a folder with matrices of eight bits, read as bytes.

    `shapes` has the wide shapes of matrices. Scales are read as (out, groups of inputs).
    """

    def __init__(self, reader: TensorReader, scheme: Scheme, where: Path) -> None:
        """Raises InputError for a matrix without scales and for scales of an unknown layout."""
        shapes: dict[str, Shape] = {}
        stored = {}
        for name, shape in reader.shapes.items():
            module, _, kind = name.rpartition(".")
            if kind == "weight_packed":
                name, shape = f"{module}.weight", (*shape[:-1], 4 * shape[-1])
                stored[name] = reader.stored(f"{module}.weight_packed")
            else:
                stored[name] = reader.stored(name)
            if kind not in _UNREAD:
                shapes[name] = shape
        super().__init__(where, stored, shapes)
        eight = {name: _FORMATS.get(stored[name].dtype) for name in shapes}
        matrices = {name: form for name, form in eight.items() if name.endswith(".weight")}
        self._formats = {name: form for name, form in matrices.items() if form}
        self.scales = {name: self._scale_of(name) for name in self._formats}
        self._weights = {scale: name for name, scale in self.scales.items()}
        self._shares = {name: self._shares_of(name, scheme) for name in self._formats}

    def read(self, name: str) -> np.ndarray:
        found, weight = super().read(name), self._weights.get(name)
        if weight is None:
            return found
        (outputs, groups), count = self._shares[weight], self.shapes[weight][0]
        return np.repeat(found.reshape(-1, groups), outputs, axis=0)[:count]

    def quantized(self, packing: Packing) -> StoredScales | None:
        formats = {self._formats.get(name) for name in packing.names}
        groups = {self._shares[name][1] for name in packing.names if name in self._formats}
        if formats == {None}:
            return None
        if len(formats) > 1 or len(groups) > 1:
            raise InputError(
                f"{self._where}: {' + '.join(packing.names)} form one matrix, but not all are "
                "quantized in the same way; use a folder that ignores all of them or none"
            )
        scales = packing.scales(tuple(self.scales[name] for name in packing.names), *groups)
        return StoredScales(formats.pop(), scales)

    def _scale_of(self, name: str) -> str:
        module = name.removesuffix(".weight")
        found = [f"{module}.{kind}" for kind in _SCALES if f"{module}.{kind}" in self.shapes]
        if len(found) != 1:
            raise InputError(
                f"{self.file_of[name]}: {name} is stored as {self._stored[name].dtype} with "
                f"{len(found)} tensors of scales ({module}.weight_scale), not one; fetch the model "
                "again"
            )
        super()._float_of(found[0])
        return found[0]

    def _shares_of(self, name: str, scheme: Scheme) -> tuple[int, int]:
        """The outputs that share a scale, and the groups of inputs."""
        scale, (count, inputs) = self.scales[name], self.shapes[name]
        shape = self.shapes[scale]
        if math.prod(shape) == 1:
            return count, 1
        if shape in ((count,), (count, 1)):
            return 1, 1
        for outputs, size in scheme.blocks:
            if inputs % size == 0 and shape == (-(-count // outputs), inputs // size):
                return outputs, inputs // size
        groups = " or ".join(f"{rows} x {size}" for rows, size in scheme.blocks) or "no groups"
        raise InputError(
            f"{self.file_of[scale]}: {scale} has shape {list(shape)} for weights "
            f"{[count, inputs]}, and config.json states {groups} that share a scale; use the "
            "config.json of these weights"
        )

    def _other(self, name: str, path: Path, content: np.ndarray) -> np.ndarray:
        values = content.reshape(self.shapes[name])
        return values ^ np.uint8(128) if self._stored[name].dtype == "I32" else values

    def _float_of(self, name: str) -> str:
        return "float32" if name in self._formats else super()._float_of(name)
