"""A target from a GGUF file has the weights, tokens and text of its source folder."""

from __future__ import annotations

import dataclasses
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf
import jax
import numpy as np
import pytest

from infer import convert
from infer.cli.flags.pair import DEMO
from moa_jax import load_target
from moa_jax.config import RopeScaling
from moa_jax.data.tokenizer import load_tokenizer
from moa_jax.files import model_folder
from moa_jax.files.gguf import folder_of
from moa_jax.pretrained import describe_target, save_target
from tests.gguf_files import Q, write_gguf
from tests.model_folders import assert_same_tensors, edit_json, refusal, save_random_pair

TARGET, OTHERS = DEMO / "target", ["ministral3", "gemma3_text", "qwen3_moe"]
TEXT = "I'd like 2 tables for 1234 people at 7:30pm,\n\nplease — crème brûlée too!  😀 <|end|>"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch) -> None:
    """Isolates the cache of each test from other tests and from the user."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def demo(tmp_path) -> Path:
    return write_gguf(tmp_path / "demo.gguf", TARGET)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "mistral", *OTHERS])
def test_families_load_as_from_their_folders(saved, tmp_path, family):
    """llama.cpp stores Mistral as a Llama without windows, and Gemma's norms with the added 1."""
    folder = saved / family / "target"
    target = load_target(write_gguf(tmp_path / "x.gguf", folder), "float32")
    same, config = load_target(folder, "float32"), target.config
    if family == "mistral":
        config = dataclasses.replace(config, family=family, sliding_windows=(6,) * 5)
    if family == "gemma3_text":  # a scale that llama.cpp derives
        block = dataclasses.replace(config.block, query_pre_attn_scalar=24)
        config = dataclasses.replace(config, block=block)
    assert config == same.config
    norms = 1e-6 if family == "gemma3_text" else 0
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=norms)
    jax.tree.map(close, target.params, same.params)


def test_rope_scaling_is_read_back(tmp_path):
    sizes = dict(hidden_size=128, num_attention_heads=2, num_key_value_heads=1)
    save_random_pair(tmp_path, "llama", 0, **sizes)
    folder, factors = tmp_path / "target", {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    llama3 = {"rope_type": "llama3", "factor": 32.0, "original_max_position_embeddings": 8192}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    for scaling in (llama3 | factors, {"rope_type": "linear", "factor": 4.0}, yarn):
        edit_json(folder / "config.json", rope_parameters=scaling | {"rope_theta": 500000.0})
        found = describe_target(write_gguf(tmp_path / "x.gguf", folder)).config
        assert found == describe_target(folder).config and found.block.rope_scaling is not None
    for keys, scaling in (  # llama.cpp's defaults, and the key of old files
        ({"llama__rope__scale_linear": 4.0}, RopeScaling("linear", 4.0)),
        ({"llama__rope__scaling__factor": 2.0}, RopeScaling("linear", 2.0)),
        ({"llama__rope__scaling__type": "none", "llama__rope__scaling__factor": 2.0}, None),
    ):
        path = write_gguf(tmp_path / "x.gguf", TARGET, **keys)
        assert describe_target(path).config.block.rope_scaling == scaling


KINDS = [Q.F16, Q.BF16, Q.Q4_0, Q.Q4_1, Q.Q5_0, Q.Q5_1, Q.Q8_0]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_quantized_tensors_are_those_of_the_package(tmp_path, kind):
    reader = model_folder.open_tensors(folder_of(write_gguf(tmp_path / "x.gguf", TARGET, kind)))
    original = model_folder.open_tensors(TARGET)
    for name in ("model.layers.3.mlp.down_proj.weight", "model.layers.11.self_attn.q_proj.weight"):
        values = np.array(original.read(name), np.float32)
        wanted = gguf.dequantize(gguf.quantize(values, kind), kind)
        # The rows of a head are quantized one by one, so their order changes nothing.
        np.testing.assert_array_equal(np.float32(reader.read(name)), wanted)


@pytest.mark.parametrize("kind", [Q.Q2_K, Q.Q3_K, Q.Q4_K, Q.Q5_K, Q.Q6_K], ids=lambda k: k.name)
def test_k_quants_are_read(tmp_path, monkeypatch, kind):
    """The package cannot write k-quants. Half of a block's bytes are 1, so scales are small."""
    rows, (_, size) = {}, gguf.GGML_QUANT_SIZES[kind]

    def made(values: np.ndarray, wanted: Q) -> np.ndarray:
        if wanted is not kind:
            return package(values, wanted)
        content = np.ones((len(values), values.shape[1] // 256 * size), np.uint8)
        content[:, ::3] = np.arange(len(values))[:, None] % 7
        rows[values.shape] = content
        return content

    package = gguf.quantize
    monkeypatch.setattr(gguf, "quantize", made)
    path = write_gguf(tmp_path / "x.gguf", TARGET, {"ffn_gate.weight": kind})
    found = model_folder.open_tensors(folder_of(path)).read("model.layers.0.mlp.gate_proj.weight")
    wanted = gguf.dequantize(rows[found.shape], kind)
    assert np.ptp(wanted) > 0
    np.testing.assert_array_equal(found, wanted)


def test_convert_writes_a_folder(demo, tmp_path):
    convert.main(["--target", str(demo), "--output", str(tmp_path / "hf")])
    target = load_target(TARGET, "float32")
    save_target(tmp_path / "same", target.config, target.params, TARGET, "float32")
    assert_same_tensors(tmp_path / "hf", tmp_path / "same")
    ours, theirs = load_tokenizer(tmp_path / "hf"), load_tokenizer(TARGET)
    assert ours(TEXT) == theirs(TEXT) and ours.chat_template == theirs.chat_template
    assert describe_target(tmp_path / "hf").generation == target.generation


def test_a_changed_file_is_read_anew(demo, tmp_path):
    first = folder_of(demo)
    assert folder_of(demo) == first
    write_gguf(demo, TARGET, Q.Q8_0)
    assert folder_of(demo) != first
    demo.unlink()
    assert "missing" in refusal(model_folder.open_tensors, first)


# ---- bad input ---------------------------------------------------------------------------------


def test_files_that_are_not_gguf(demo, tmp_path):
    content, name = demo.read_bytes(), b"blk.0.ffn_up.weight"
    (tmp_path / "other.gguf").write_bytes(content)
    assert "2 GGUF files (demo.gguf, other.gguf)" in refusal(load_target, tmp_path)
    assert "no such file" in refusal(load_target, tmp_path / "y.gguf")
    cut = [content[: int(len(content) * share)] for share in (0.0, 0.0002, 0.01, 0.999)]
    for damaged in (*cut, b"PK\x03\x04" * 100):
        demo.write_bytes(damaged)
        assert "cannot read" in refusal(load_target, demo)
    unknown = bytearray(content)
    place = content.index(name) + len(name) + 4 + 2 * 8  # after the number of sizes, and both sizes
    unknown[place : place + 4] = (250).to_bytes(4, "little")
    demo.write_bytes(unknown)
    assert "250" in refusal(load_target, demo)


BAD: list[tuple[dict, str]] = [
    ({"general__architecture": "mamba"}, "'mamba' is not supported"),
    ({"split__count": 3}, "one of 3 parts"),
    ({"llama__expert_count": 8}, "llama.expert_count is 8"),
    ({"llama__rope__scaling__type": "longrope"}, "rope scaling 'longrope'"),
    ({"llama__rope__scaling__type": "yarn"}, "original_context_length is missing"),
    ({"llama__rope__scaling__yarn_attn_factor": 0.5}, "yarn_attn_factor is 0.5"),
    ({"llama__rope__dimension_count": 32}, "rope.dimension_count is 32"),
    ({"llama__embedding_length": None}, "llama.embedding_length is missing"),
    ({"tokenizer__ggml__merges": None}, "tokenizer.ggml.merges is missing"),
    ({"tokenizer__ggml__pre": "other"}, "'other' is not supported"),
    ({"tokenizer__ggml__eos_token_id": 99999}, "99999 is beyond"),
    ({"tokenizer__ggml__token_type": [1, 3]}, "has 2 entries for 2048 tokens"),
    ({"leave_out": "blk.1.ffn_up.weight"}, "lacks 1 tensor (model.layers.1.mlp.up_proj"),
]


@pytest.mark.parametrize("keys, line", BAD, ids=str)
def test_metadata_that_are_refused(tmp_path, keys, line):
    said = refusal(load_target, write_gguf(tmp_path / "x.gguf", TARGET, **keys))
    assert line in said and "x.gguf" in said


# ---- tokenizers, beside transformers' own reading ------------------------------------------------


def sentencepiece_keys(texts: list[str]) -> dict:
    """Returns metadata of a SentencePiece vocabulary trained on texts: scores rank its merges."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=1000, show_progress=False))
    found = json.loads(trained.to_str())["model"]["vocab"]
    pieces = sorted(found, key=found.__getitem__)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    keys = {"model": "llama", "tokens": tokens, "bos_token_id": 1, "eos_token_id": 2}
    keys |= dict.fromkeys(("pre", "merges", "padding_token_id"))
    keys["scores"] = [0.0] * 259 + [-float(rank) for rank in range(len(pieces))]
    keys["token_type"] = [2, 3, 3] + [6] * 256 + [1] * len(pieces)
    return {f"tokenizer__ggml__{key}": value for key, value in keys.items()}


@pytest.mark.parametrize("kind", ["llama-bpe", "qwen2", "smollm", "gpt-2", "sentencepiece"])
def test_ids_are_those_of_transformers(tmp_path, data, kind):
    from transformers import AutoTokenizer

    lines = (data / "chat" / "validation.jsonl").read_text(encoding="utf-8").splitlines()[:200]
    is_bpe = kind != "sentencepiece"
    keys = {"tokenizer__ggml__pre": kind} if is_bpe else sentencepiece_keys(lines)
    ours = load_tokenizer(folder_of(write_gguf(tmp_path / "x.gguf", TARGET, **keys)))
    theirs = AutoTokenizer.from_pretrained(tmp_path, gguf_file="x.gguf")
    for text in [TEXT, "Two  spaces", "tabs\tand\n\n\nlines", "𝔘𝔫𝔦 ÄÖÜ ﬁ", *lines]:
        # Without a key in the file, readers disagree on the first token of Llama 3.
        ids = ours(text, add_special_tokens=not is_bpe)["input_ids"]
        assert ids == theirs(text, add_special_tokens=not is_bpe)["input_ids"], text
        assert ours.decode(ids) == theirs.decode(ids)


# ---- ends, beginnings and paths ------------------------------------------------------------------


def test_all_ends_are_read(tmp_path):
    for keys, ends in (
        ({"tokenizer__ggml__eot_token_id": 2, "tokenizer__ggml__eom_token_id": 3}, (4, 2, 3)),
        ({"tokenizer__ggml__eos_token_id": 1}, (1, 4)),  # the template's <|end|> is token 4
    ):
        path = write_gguf(tmp_path / "x.gguf", TARGET, **keys)
        assert describe_target(path).generation.eos_ids == ends


def test_qwen_composes_letters(tmp_path):
    """The tokenizer.json files of these models compose letters, too."""
    for pre, composes in (("qwen2", True), ("gpt-2", False)):
        path = write_gguf(tmp_path / f"{pre}.gguf", TARGET, tokenizer__ggml__pre=pre)
        ids_of = load_tokenizer(folder_of(path))
        assert (ids_of("caf\u00e9").input_ids == ids_of("cafe\u0301").input_ids) == composes


def test_text_begins_as_llama_cpp_begins_it(tmp_path):
    off = {"tokenizer__ggml__add_bos_token": False}
    for pre, keys, begins in (("llama-bpe", {}, 1), ("llama-bpe", off, 0), ("qwen2", {}, 0)):
        path = write_gguf(tmp_path / "x.gguf", TARGET, tokenizer__ggml__pre=pre, **keys)
        tokenizer = load_tokenizer(folder_of(path))
        ids = tokenizer("Hi")["input_ids"]
        assert (ids[0] == tokenizer.bos_token_id) == begins
        assert tokenizer("Hi", add_special_tokens=False)["input_ids"] == ids[begins:]


def test_a_cache_that_cannot_be_written(demo, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    folder = folder_of(demo)
    assert folder_of(demo) == folder  # made once in a process
    one, two = load_target(folder).params, load_target(demo).params
    jax.tree.map(np.testing.assert_array_equal, one, two)


def test_processes_that_meet_a_file_at_once(demo):
    with ThreadPoolExecutor(4) as threads:
        found = {*threads.map(lambda _: folder_of(demo), range(8))}
    assert len(found) == 1
    assert [path.name for path in found.pop().parent.iterdir()] == ["demo"]
