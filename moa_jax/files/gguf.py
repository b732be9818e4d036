"""GGUF files as model folders: metadata becomes the JSON files, tensors are read in place.

    x.gguf                          CACHE/gguf/KEY/x/
      sizes, RoPE, end ids   -->      config.json, generation_config.json
      vocabulary, template   -->      tokenizer.json, tokenizer_config.json
      names, types, offsets  -->      gguf_tensors.json
      tensors (quantized)    <--      model.gguf, a link to x.gguf

KEY is a hash of the path, inode, size and times of x.gguf, so a changed file gets a new folder. The
folder loads like any other target; a tensor is dequantized when it is read. llama.cpp stores the
rows of a Llama's query and key heads in the order of its own rotary embedding:

    llama.cpp   row 2i of a head is row i of the first half, row 2i + 1 row i of the second half
    here        the first half of a head's rows, then the second half

The norm scales of Gemma include the 1 that is added to the stored weights here. The experts of a
layer are one tensor, whose parts are read as the tensors of the experts.

References: the GGUF specification (ggml's docs/gguf.md); llama.cpp's convert_hf_to_gguf.py and, for
YaRN's factors and Gemma's defaults, llama-model.cpp.
"""

from __future__ import annotations

import hashlib
import math
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from moa_jax.config import RopeScaling
from moa_jax.errors import InputError, first_line
from moa_jax.files import tensor_reader, whole_files
from moa_jax.files.families import ARCHITECTURES as CLASSES
from moa_jax.files.gguf_tokenizer import write_tokenizer
from moa_jax.files.hf_config import GEMMA3, rope_to_hf, target_config_from_hf
from moa_jax.files.paths import writable_cache
from moa_jax.model import convert
from moa_jax.model.layers import inverse_frequencies

FORMAT = 3  # of the folder; raise when derived files or checks change
INDEX, LINK = tensor_reader.GGUF_INDEX, tensor_reader.GGUF_LINK
# Control tokens that end a turn or a sequence, by name, as in llama.cpp. A GGUF file states one end
# token; the generation_config.json of the same model often lists several.
ENDS = (
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>"),
    *("<|endoftext|>", "<|end_of_text|>", "<end_of_turn>"),
)
ARCHITECTURES = {
    "llama": gguf.MODEL_ARCH.LLAMA,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "qwen3moe": gguf.MODEL_ARCH.QWEN3MOE,
    "mistral3": gguf.MODEL_ARCH.MISTRAL3,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
}
REORDERED = ("llama", "mistral3")  # architectures whose query and key rows are reordered
# Keys of an architecture that change the computation, with the only supported value; None stands
# for absent or 0.
_ABSENT = (
    "attention.clamp_kqv attention.max_alibi_bias attention.scale attention.sliding_window "
    "attention.temperature_scale attn_logit_softcapping embedding_scale expert_count "
    "expert_shared_count expert_group_count leading_dense_block_count "
    "final_logit_softcapping logit_scale residual_scale rope.scaling.yarn_log_multiplier "
    "use_parallel_residual"
)
NEUTRAL: dict[str, Any] = dict.fromkeys(_ABSENT.split())
NEUTRAL |= {"attention.causal": True, "rope.scaling.attn_factor": 1.0}
NEUTRAL |= {"rope.scaling.yarn_attn_factor": 1.0, "rope.scaling.yarn_ext_factor": 1.0}
OWN = {  # keys that are read for these architectures alone
    "gemma3": ("attention.sliding_window",),
    "mistral3": ("attention.temperature_scale", "rope.scaling.yarn_log_multiplier"),
    "qwen3moe": ("expert_count",),
}
_ORIGINAL = "original_max_position_embeddings"
ROPE_FACTORS = "rope_freqs.weight"  # (E / 2,): llama.cpp's divisors of rotary frequencies


def folder_of(path: Path) -> Path:
    """The model folder of a GGUF file, written when the file is first opened.

    Raises InputError for a truncated file, an unknown architecture or quantization, one part of
    several, a missing tensor, and incomplete metadata of the tokenizer.
    """
    file = path.resolve()  # the hub's cache links to files named by a hash
    status = file.stat()
    times = status.st_mtime_ns, status.st_ctime_ns
    seen = repr((FORMAT, str(file), status.st_ino, status.st_size, *times))
    folder = writable_cache("gguf") / hashlib.sha256(seen.encode()).hexdigest()[:16] / path.stem
    if not (folder / INDEX).is_file():
        try:
            _write_folder(file, folder)
        except InputError:
            raise
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
            raise InputError(
                f"{file}: its metadata hold a value of the wrong kind ({first_line(error)}); "
                "convert the model again"
            ) from error
    return folder


def _write_folder(path: Path, folder: Path) -> None:
    """Write all files of a GGUF's folder under a temporary name, then rename the folder."""
    file = _opened(path)
    metadata = _Metadata(path, file)
    config, tensors = _config_and_tensors(file, metadata)
    eos_ids, pad_id = metadata.special_ids(config["vocab_size"])
    ids = {"eos_token_id": eos_ids, "pad_token_id": pad_id, "bos_token_id": metadata.id("bos")}
    ids = {key: value for key, value in ids.items() if value is not None}
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=folder.parent) as scratch:
        fresh = Path(scratch, folder.name)
        fresh.mkdir()
        whole_files.write_json(fresh / "config.json", config | ids)
        whole_files.write_json(fresh / "generation_config.json", ids)
        write_tokenizer(fresh, metadata.get, str(path))
        (fresh / LINK).symlink_to(path)
        whole_files.write_json(fresh / INDEX, tensors)
        try:
            fresh.rename(folder)
        except OSError:
            if not (folder / INDEX).is_file():  # otherwise another process wrote the folder first
                raise


def _opened(path: Path) -> gguf.GGUFReader:
    try:
        return gguf.GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
        raise InputError(
            f"cannot read {path}; cut short, or no GGUF file of a known version and quantization "
            f"({first_line(error)}); fetch it again"
        ) from error


class _Metadata:
    """The metadata of a GGUF file; the constructor refuses unsupported architectures and values."""

    def __init__(self, path: Path, file: gguf.GGUFReader) -> None:
        self.path, self._fields = path, file.fields
        parts = self.get("split.count", 1)
        if parts > 1:
            raise InputError(
                f"{path} is one of {parts} parts of a model; merge them with llama.cpp's "
                "llama-gguf-split --merge"
            )
        self.architecture = self.need("general.architecture")
        if self.architecture not in ARCHITECTURES:
            known = ", ".join(ARCHITECTURES)
            raise InputError(
                f"{path}: architecture {self.architecture!r} is not supported; use one of {known}"
            )
        for key, neutral in NEUTRAL.items():
            value = self.of_model(key, neutral)
            if key in OWN.get(self.architecture, ()):
                continue
            if value != neutral and (value or neutral):  # 0 counts as absent
                raise InputError(
                    f"{path}: {self.architecture}.{key} is {value}, which is not supported; use a "
                    "dense model with full, causal attention that is not scaled"
                )

    def get(self, key: str, default: Any = None) -> Any:
        """The value of a key; raises InputError for a string that is not UTF-8."""
        if key not in self._fields:
            return default
        try:
            return self._fields[key].contents()
        except UnicodeDecodeError as error:
            raise InputError(f"{self.path}: {key} is not UTF-8; fetch it again") from error

    def need(self, key: str) -> Any:
        if (value := self.get(key)) is None:
            raise InputError(f"{self.path}: {key} is missing; convert the model again")
        return value

    def of_model(self, key: str, default: Any = None) -> Any:
        """The value of a key below the architecture's prefix."""
        return self.get(f"{self.architecture}.{key}", default)

    def size(self, key: str) -> int:
        value = self.need(f"{self.architecture}.{key}")
        if not isinstance(value, int):
            raise InputError(
                f"{self.path}: {self.architecture}.{key} is {value}, not one number; layers of "
                "different sizes are not supported"
            )
        return value

    def id(self, name: str) -> int | None:
        return self.get(f"tokenizer.ggml.{name}_token_id")

    def special_ids(self, vocab_size: int) -> tuple[list[int], int | None]:
        """All ids that end a turn or a sequence, and the padding id.

        Raises InputError for an id outside the token list or the model's vocabulary.
        """
        tokens = self.need("tokenizer.ggml.tokens")
        kinds = self.get("tokenizer.ggml.token_type", ())
        stated = [self.id(name) for name in ("eos", "eot", "eom")]
        ends = [
            index
            for index, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
            if kind == gguf.TokenType.CONTROL and token in ENDS
        ]
        ids = list(dict.fromkeys(id for id in [*stated, *ends] if id is not None))
        pad_id = self.id("padding")
        for each in [*ids, *([] if pad_id is None else [pad_id])]:
            if each >= min(len(tokens), vocab_size):
                raise InputError(
                    f"{self.path}: token id {each} is beyond its {min(len(tokens), vocab_size)} "
                    "tokens; convert the model again"
                )
        return ids, pad_id


def _config_and_tensors(
    file: gguf.GGUFReader, metadata: _Metadata
) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json without special ids, and the entry of each tensor by its Hugging Face name."""
    stored = {tensor.name: tensor for tensor in file.tensors}
    config = _config(metadata, stored)
    target = target_config_from_hf(config, str(metadata.path))
    names = gguf.get_tensor_name_map(ARCHITECTURES[metadata.architecture], target.num_layers)
    names_of: dict[str | None, list[str]] = {}
    for name in convert.stored_shapes(convert.target_table(target)):
        of_all = re.sub(r"\.experts\.\d+\.", ".experts.", name)  # one tensor per expert here
        names_of.setdefault(names.get_name(of_all, (".weight", ".bias")), []).append(name)
    heads = {"q_proj": target.block.num_heads, "k_proj": target.block.num_kv_heads}
    heads = heads if metadata.architecture in REORDERED else {}
    tensors: dict[str, Any] = {}
    for tensor in file.tensors:
        if tensor.name == ROPE_FACTORS:
            continue
        parts = names_of.get(tensor.name, [tensor.name])  # loading refuses unknown tensors
        shape = [int(size) for size in reversed(tensor.shape)]
        shape = shape[1:] if len(parts) > 1 and shape[0] == len(parts) else shape
        begin, size = int(tensor.data_offset), int(tensor.n_bytes) // len(parts)
        for index, name in enumerate(parts):
            ends = [begin + index * size, begin + (index + 1) * size]
            tensors[name] = {"type": tensor.tensor_type.name, "shape": shape, "data_offsets": ends}
            if count := heads.get(name.split(".")[-2] if "." in name else ""):
                tensors[name]["heads"] = count
            if target.block.gemma_norms and name.endswith("norm.weight"):
                tensors[name]["less"] = 1.0
    reader = GGUFReader(metadata.path, tensors)
    reader.check(convert.stored_shapes(convert.target_table(target)))
    return config, tensors


def _config(metadata: _Metadata, stored: Mapping[str, gguf.ReaderTensor]) -> dict[str, Any]:
    """The config.json derived from the metadata and the names of the tensors."""
    width, heads = metadata.size("embedding_length"), metadata.size("attention.head_count")
    if width % heads and metadata.of_model("attention.key_length") is None:
        raise InputError(
            f"{metadata.path}: {heads} heads do not divide a width of {width}; convert it again"
        )
    head_dim = metadata.of_model("attention.key_length", width // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if metadata.of_model(key, head_dim) != head_dim:
            raise InputError(
                f"{metadata.path}: {metadata.architecture}.{key} is {metadata.of_model(key)} where "
                f"heads have {head_dim}; use a model in which the two are equal"
            )
    if (embedding := stored.get("token_embd.weight")) is None:
        raise InputError(f"{metadata.path} lacks the tensor token_embd.weight; fetch it again")
    theta = _shortest(metadata.of_model("rope.freq_base", 10000.0))
    rope = _rope_scaling(metadata, stored, head_dim, theta)
    is_llama, family = metadata.architecture == "llama", _family(metadata)
    return {
        "architectures": [CLASSES[family]],
        "model_type": family,
        "vocab_size": int(embedding.shape[-1]),
        "hidden_size": width,
        "intermediate_size": metadata.size("feed_forward_length"),
        "num_hidden_layers": metadata.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.of_model("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": metadata.size("context_length"),
        "rms_norm_eps": _shortest(
            metadata.need(f"{metadata.architecture}.attention.layer_norm_rms_epsilon")
        ),
        "rope_theta": theta,
        "rope_scaling": rope,
        "tie_word_embeddings": "output.weight" not in stored,
        "attention_bias": is_llama and "blk.0.attn_q.bias" in stored,
        "mlp_bias": is_llama and "blk.0.ffn_gate.bias" in stored,
        "sliding_window": None,
        **(_gemma3(metadata, width // heads, head_dim) if family == GEMMA3 else {}),
        **(_experts(metadata) if metadata.architecture == "qwen3moe" else {}),
    }


def _family(metadata: _Metadata) -> str:
    """The model type of transformers; `mistral3` holds Mistral Small 3 and Ministral 3."""
    if metadata.architecture == "mistral3":
        return "ministral3" if metadata.of_model("attention.temperature_scale") else "mistral"
    types = {"gemma3": GEMMA3, "qwen3moe": "qwen3_moe"}
    return types.get(metadata.architecture, metadata.architecture)


def _gemma3(metadata: _Metadata, width_per_head: int, head_dim: int) -> dict[str, Any]:
    """Windows, and values that llama.cpp does not store: the scale of the 27B model's scores."""
    is_27b = metadata.size("block_count") == 62
    return {
        "sliding_window": metadata.size("attention.sliding_window"),
        "sliding_window_pattern": metadata.of_model("attention.sliding_window_pattern", 6),
        "rope_local_base_freq": _shortest(metadata.of_model("rope.freq_base_swa", 10000.0)),
        "query_pre_attn_scalar": width_per_head if is_27b else head_dim,
    }


def _experts(metadata: _Metadata) -> dict[str, Any]:
    """Sizes of experts; llama.cpp scales the weights of a token's experts to a sum of 1."""
    return {
        "num_experts": metadata.size("expert_count"),
        "num_experts_per_tok": metadata.size("expert_used_count"),
        "moe_intermediate_size": metadata.size("expert_feed_forward_length"),
        "norm_topk_prob": True,
    }


def _shortest(value: float) -> float:
    """The shortest decimal number that rounds to the same float32."""
    return float(str(np.float32(value)))


def _rope_scaling(
    metadata: _Metadata, stored: Mapping[str, gguf.ReaderTensor], head_dim: int, theta: float
) -> dict[str, Any] | None:
    """RoPE scaling in the form of config.json; raises InputError for unsupported kinds."""
    # As in llama.cpp: the type defaults to linear, older files use another key, and 0 means 1.
    kind = metadata.of_model("rope.scaling.type", "linear")
    factor = metadata.of_model("rope.scaling.factor", metadata.of_model("rope.scale_linear", 0.0))
    scaled = kind != "none" and not (kind == "linear" and factor in (0.0, 1.0))
    if ROPE_FACTORS in stored:
        if scaled:
            raise InputError(
                f"{metadata.path}: {ROPE_FACTORS} and rope scaling {kind!r} by {factor:g} are both "
                "there; convert the model again"
            )
        factors = np.array(stored[ROPE_FACTORS].data, np.float32)
        return _llama3_scaling(metadata.path, factors, head_dim, theta)
    if not scaled:
        return None
    if kind == "yarn":
        return _yarn(metadata, factor)
    if kind != "linear":
        raise InputError(
            f"{metadata.path}: rope scaling {kind!r} is not supported; use a model with llama3, "
            "linear or yarn scaling, or without scaling"
        )
    return {"rope_type": "linear", "factor": _shortest(factor)}


def _yarn(metadata: _Metadata, factor: float) -> dict[str, Any]:
    """YaRN's settings; the multiplier of its logarithm is transformers' `mscale_all_dim`."""
    length = metadata.size("rope.scaling.original_context_length")
    found = {"rope_type": "yarn", "factor": _shortest(factor), _ORIGINAL: length}
    if multiplier := metadata.of_model("rope.scaling.yarn_log_multiplier"):
        found |= {"mscale": 1.0, "mscale_all_dim": _shortest(multiplier)}
    for key, name in (
        ("rope.scaling.yarn_beta_fast", "beta_fast"),
        ("rope.scaling.yarn_beta_slow", "beta_slow"),
        ("attention.temperature_scale", "llama_4_scaling_beta"),
    ):
        if value := metadata.of_model(key):
            found[name] = _shortest(value)
    return found


def _llama3_scaling(
    path: Path, factors: np.ndarray, head_dim: int, theta: float
) -> dict[str, Any] | None:
    """The llama3 scaling that divides rotary frequencies by these factors; None for factors of 1.

    For t = original * frequency / 2 pi and k = (t - low) / (high - low), the scaling sets
    1 / factor_i = k + (1 - k) / factor where 0 < k < 1. So k is linear in the frequency, and low is
    free: scaling original, low and high by one number changes nothing. All releases have low = 1.
    """
    if (factors == 1).all():
        return None
    frequency = inverse_frequencies(head_dim, theta, None).astype(np.float64)
    if factors.shape != frequency.shape or not np.isfinite(factors).all():
        raise InputError(
            f"{path}: {ROPE_FACTORS} is not one factor for each frequency; fetch it again"
        )
    factor = float(factors.max())
    between = (factors > 1) & (factors < factor * (1 - 1e-6))
    refusal = InputError(
        f"{path}: the factors in {ROPE_FACTORS} are not those of a llama3 scaling; use a model "
        "with llama3 or linear scaling, or without scaling"
    )
    if between.sum() < 2:
        raise refusal
    kept = (1 / factors[between].astype(np.float64) - 1 / factor) / (1 - 1 / factor)
    slope, offset = np.polyfit(frequency[between], kept, 1)
    if offset >= 0:
        raise refusal
    high = 1 - 1 / offset
    original = round(slope * (high - 1) * 2 * math.pi)
    scaling = RopeScaling("llama3", round(factor, 3), 1.0, round(high, 3), original)
    found = inverse_frequencies(head_dim, theta, scaling)
    if not np.allclose(found, frequency / factors, rtol=1e-4, atol=0):
        raise refusal
    return rope_to_hf(scaling)


class GGUFReader(tensor_reader.TensorReader):
    """The tensors of a GGUF file by Hugging Face name; quantized tensors are read as float32."""

    def __init__(self, path: Path, tensors: Mapping[str, Any]) -> None:
        """`tensors` are the entries of gguf_tensors.json."""
        self._tensors = tensors
        place = lambda entry: tensor_reader.Stored(path, entry["type"], *entry["data_offsets"])
        stored = {name: place(entry) for name, entry in tensors.items()}
        shapes = {name: tuple(entry["shape"]) for name, entry in tensors.items()}
        super().__init__(path, stored, shapes)

    @classmethod
    def of_folder(cls, folder: Path) -> GGUFReader:
        """The tensors of a folder from `folder_of`; raises InputError if the file is missing."""
        path = (folder / LINK).resolve()
        if not path.is_file():
            raise InputError(
                f"cannot read {path}: the GGUF file of {folder} is missing; restore it"
            )
        return cls(path, whole_files.read_json(folder / INDEX))

    def read(self, name: str) -> np.ndarray:
        values, shape = super().read(name), self.shapes[name]
        if heads := self._tensors[name].get("heads"):
            pairs = values.reshape(heads, -1, 2, *shape[1:])
            values = pairs.swapaxes(1, 2).reshape(shape)
        return values - less if (less := self._tensors[name].get("less")) else values

    def _other(self, name: str, path: Path, content: np.ndarray) -> np.ndarray:
        shape = self.shapes[name]
        rows_RX = content.reshape(math.prod(shape[:-1]), -1)
        return gguf.dequantize(rows_RX, self._type_of(name)).reshape(shape)

    def num_bytes(self, name: str) -> int:
        """Size in bytes of a tensor as `read` returns it."""
        return math.prod(self.shapes[name]) * np.dtype(self._float_of(name)).itemsize

    @property
    def dtype(self) -> np.dtype:
        """The widest dtype of the matrices; quantized matrices count as float32."""
        matrices = [name for name, shape in self.shapes.items() if len(shape) > 1]
        return max((np.dtype(self._float_of(name)) for name in matrices), key=lambda d: d.itemsize)

    def _float_of(self, name: str) -> str:
        stored = self._stored[name].dtype
        if stored in tensor_reader.FLOATS:
            return tensor_reader.FLOATS[stored]
        kind = self._type_of(name)
        try:
            gguf.dequantize(np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8), kind)
        except NotImplementedError as error:
            raise InputError(
                f"{self._where}: {name} is stored as {stored}, which the package gguf does "
                "not dequantize; use Q8_0, Q4_0 or another common type"
            ) from error
        return "float32"

    def _type_of(self, name: str) -> gguf.GGMLQuantizationType:
        return gguf.GGMLQuantizationType[self._stored[name].dtype]
