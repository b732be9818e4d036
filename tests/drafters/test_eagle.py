"""EAGLE-1, 2 and 3 against the authors' recordings, a torch oracle and official files."""

# ruff: noqa: F811 (an imported fixture is an argument too)

import dataclasses
import importlib
import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from infer import convert
from infer.peers import unpickle
from moa_jax import load_drafter
from moa_jax.config import ChunkConfig, Eagle3Config, FeedbackConfig, LossConfig, Objective
from moa_jax.drafters import eagle, eagle3, eagle_common
from moa_jax.files import model_folder, pickles
from moa_jax.pretrained import save_drafter
from moa_jax.training.distillation import tap
from tests import drafting
from tests.compare import assert_norm_close, assert_value
from tests.conftest import arrays_of, golden_cases, slow
from tests.drafters.test_kinds import drafter_of, wide_target  # noqa: F401
from tests.drafting import batch_of, make, recorded_training, stored, untrained
from tests.model_folders import edit_json, edit_tensors, refusal, tensors_of, written_by
from tests.oracle import eagle as oracle

IDS = tuple(range(3, 90, 2))
EAGLE3 = Eagle3Config(2, 44, draft_ids=IDS)
recorded = pytest.mark.parametrize("folder", golden_cases("eagle_", "train.npz"))


# ---- recorded cases -----------------------------------------------------------------------


@recorded
@pytest.mark.parametrize("noise", ["noise0", "noise1"])
def test_draft_loss_and_gradients(folder, noise):
    """The authors add noise to the targets of the loss as well."""
    target, drafter, arrays, batch = recorded_training(folder)
    layer = eagle.layer(drafter.config, target.config)
    functions = make(target, drafter)
    noise_2BTD = None
    if noise == "noise1":
        draws = (arrays[f"noise1/rand_{what}"] - 0.5 for what in ("hidden", "embed"))
        noise_2BTD = arrays["noise1/noise_uniform_scale"] * np.stack(list(draws))

    @jax.jit
    def gradient(params, batch):
        def loss(params):
            tapped = tap(target.config, functions, target.params, batch, jnp.float32)
            shared = functions.shared_params(target.params)
            given = (params, shared, batch)
            inputs = eagle_common.training_inputs(layer, *given, tapped, noise_2BTD)
            if noise_2BTD is not None:
                inputs = inputs._replace(goal_BTD=inputs.goal_BTD + noise_2BTD[0])
            return eagle_common.loss_of(layer, Objective(), *given, inputs, jnp.float32(0))

        return jax.grad(loss, has_aux=True)(params)

    grads, parts = gradient(drafter.params, batch)
    for ours, theirs in (("cross_entropy", "forward_KL"), ("feature_loss",) * 2, ("loss",) * 2):
        assert_value(parts[ours], arrays[f"{noise}/{theirs}"], ours)
    if noise == "noise0":
        expected = arrays_of(folder / "grads.npz")
        for name, value in stored(target, drafter, grads).items():
            assert_norm_close(value, expected[f"noise0/{name}"], name)


# ---- any pair -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind, writer",
    [slow("eagle3", None), slow("eagle3.1", "nemo"), slow("eagle3-qwen3", "speculators")],
)
def test_training_time_test_equals_the_oracle(kind, writer, wide_target, tmp_path):
    """Compares loss and gradients of two rows, in chunks; the head lacks some target tokens.

    Drafters in the files of other software draft the text of plain decoding.
    """
    drafter, lengths, steps = drafter_of(kind, wide_target), (16, 12), 3
    config, saved = drafter.config, (drafter.config, drafter.params, wide_target)
    save_drafter(tmp_path / "d", "eagle3", *saved, layout="authors")
    if writer:
        drafter = load_drafter(written_by(tmp_path / "d", writer), wide_target)
        assert drafter.config == config
    draw = np.random.default_rng(7)
    tokens_BT = draw.integers(1, 100, (2, 16))
    response_BT = draw.random((2, 16)) < 2 / 3
    real_BT = np.arange(16) < np.array(lengths)[:, None]
    batch = batch_of(tokens_BT * real_BT, real_BT, response_BT & real_BT)
    loss, feedback = LossConfig(token_weight=1.0), FeedbackConfig(steps=steps, decay=0.8)
    objective = Objective(loss=loss, chunks=ChunkConfig(head=5), feedback=feedback)
    parts, gradient = drafting.loss_and_gradient(wide_target, drafter, batch, objective)

    files = {
        name.removeprefix("model.").replace("layers.0.", "midlayer."): torch.from_numpy(x.copy())
        for name, x in tensors_of(tmp_path / "d").items()
    }
    learnt = {name: files[name].requires_grad_() for name in gradient}
    functions = make(wide_target, drafter)
    given = (wide_target.config, functions, wide_target.params)
    tapped, conversations = jax.jit(lambda batch: tap(*given, batch, jnp.float32))(batch), []
    for row, size in enumerate(lengths):
        cut = (row, slice(0, size))
        tokens, answer = (x[cut].tolist() for x in (batch.tokens_BT, batch.response_BT))
        reads = _reads(wide_target, tapped, cut)
        conversations.append(oracle.LearntConversation(tokens, reads, answer))
    block = wide_target.config.block
    flags = (config.norm_before_residual, config.norm_output)
    sizes = oracle.Sizes(block.head_dim, block.rms_norm_eps, block.rope_theta, *flags)
    expected = oracle.loss_eagle3(files, conversations, steps, 0.8, sizes)
    assert_value(parts["loss"], expected.detach(), "loss")
    slopes = torch.autograd.grad(expected, list(learnt.values()))
    for name, slope in zip(learnt, slopes, strict=True):
        assert_norm_close(gradient[name], slope, name)
    if writer:
        drafting.assert_changes_nothing(wide_target, drafter)


def _reads(target, tapped, cut):
    as_torch = lambda x: torch.from_numpy(np.array(x))
    streams = [as_torch(stream[cut]) for stream in tapped.streams]
    head = as_torch(target.params["lm_head"].T)
    embed = as_torch(target.params["embed"])
    return oracle.Reads(as_torch(tapped.hidden_BTD[cut]), streams, embed, head)


# ---- files --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def official(wide_target, tmp_path_factory):
    """Returns an EAGLE-3 drafter's files in the official layout, without layer ids."""
    found = untrained(wide_target, "eagle3", EAGLE3)
    folder = tmp_path_factory.mktemp("official") / "d"
    save_drafter(folder, "eagle3", found.config, found.params, wide_target, layout="authors")
    edit_json(folder / "config.json", **{TOP: None, "eagle_config": None})
    return folder


@pytest.fixture
def files(official, tmp_path):
    """Returns a copy of these files, to be changed or damaged."""
    return shutil.copytree(official, tmp_path / "d")


def test_draft_vocabulary_is_stored_beside_the_head(wide_target, files):
    tensors = tensors_of(files)
    assert (tensors["d2t"] + np.arange(len(IDS))).tolist() == list(IDS)
    assert np.flatnonzero(tensors["t2d"]).tolist() == list(IDS)
    assert tensors["d2t"].dtype == np.int64 and tensors["t2d"].dtype == bool
    edit_tensors(files, drop="d2t")
    assert "no d2t says which" in refusal(load_drafter, files, wide_target)
    edit_tensors(files, d2t=np.zeros(len(IDS), np.int64) + 100)
    assert "d2t names" in refusal(load_drafter, files, wide_target)


USUAL, OTHER = [2, 2, 2], [1, 2, 4]  # streams by the layer they enter; the target has five layers
TOP, BEFORE = eagle3.LAYER_IDS, [0, 1, 3]  # the layers that OTHER come out of


@pytest.mark.parametrize(
    "stated, layers",
    [
        ({}, ()),
        ({"eagle_config": {TOP: [1, 1, 1]}}, ()),  # SpecForge, SGLang
        ({"eagle_config": {TOP: BEFORE}}, OTHER),
        ({"eagle_config": {TOP: USUAL}}, [3, 3, 3]),
        ({TOP: USUAL}, ()),  # speculators, vLLM
        ({TOP: OTHER}, OTHER),
        ({TOP: OTHER, "eagle_config": {TOP: BEFORE}}, OTHER),
        ({"eagle_config": {TOP: OTHER}, "method": "eagle3"}, OTHER),  # ours, as it was
    ],
)
def test_layers_are_counted_as_their_writers_do(wide_target, files, stated, layers):
    edit_json(files / "config.json", **stated)
    found = load_drafter(files, wide_target)
    assert found.config == dataclasses.replace(EAGLE3, tapped_layers=tuple(layers))
    of_others = bool(layers) and "method" not in stated
    assert [str(list(layers)) in notice for notice in found.notices] == [True] * of_others


def test_layers_are_written_for_every_reader(wide_target, tmp_path):
    config = dataclasses.replace(EAGLE3, tapped_layers=tuple(OTHER))
    found = untrained(wide_target, "eagle3", config)
    save_drafter(tmp_path / "d", "eagle3", config, found.params, wide_target, layout="authors")
    written = json.loads((tmp_path / "d" / "config.json").read_text())
    assert written[TOP] == OTHER and written["eagle_config"] == {TOP: BEFORE}
    where = ["--target", str(wide_target.folder), "--draft", str(tmp_path / "d")]
    convert.main([*where, "--output", str(tmp_path / "ours")])
    for folder in (tmp_path / "d", tmp_path / "ours"):
        assert load_drafter(folder, wide_target).config == config


SPECULATORS = {  # what readers need, and what our drafters compute
    "speculators_model_type": "eagle3",  # speculators 0.9, src/speculators/config.py
    "speculators_version": "0.9.0",
    "draft_vocab_size": len(IDS),  # src/speculators/models/eagle3/config.py
    **dict.fromkeys(("norm_before_fc", "fc_norm", "norm_output"), False),
    "norm_before_residual": False,  # vLLM, .../configs/speculators/algos.py: true if missing
    TOP: OTHER,
}


def test_files_are_those_of_the_speculators_library(wide_target, files, tmp_path, capsys):
    edit_json(files / "config.json", **{TOP: OTHER})
    where = ["--target", str(wide_target.folder), "--draft", str(files), "--to", "speculators"]
    convert.main([*where, "--output", str(tmp_path / "new")])
    assert "verifier.name_or_path is 'target', not a model of the hub" in capsys.readouterr().err
    config = json.loads((tmp_path / "new" / "config.json").read_text())
    assert config.items() >= SPECULATORS.items() and "eagle_config" not in config
    whole = json.loads((wide_target.folder / "config.json").read_text())
    changed = {"num_hidden_layers": 1, "intermediate_size": 44, "num_key_value_heads": 2}
    layer = config["transformer_layer_config"]
    for key in ("model_type", "vocab_size", "hidden_size", "num_attention_heads", *changed):
        assert layer[key] == (whole | changed)[key]
    block = config["speculators_config"]  # vLLM, .../configs/speculators/base.py
    assert block["algorithm"] == "eagle3"
    assert block["verifier"]["architectures"] == ["LlamaForCausalLM"]
    assert block["proposal_methods"][0].items() >= {"speculative_tokens": 4}.items()
    written, source = tensors_of(tmp_path / "new"), tensors_of(files)
    assert written.keys() == {name.replace("midlayer", "layers.0") for name in source}
    for name, tensor in source.items():
        np.testing.assert_array_equal(written[name.replace("midlayer", "layers.0")], tensor)
    falling = dataclasses.replace(EAGLE3, draft_ids=IDS[::-1], tapped_layers=tuple(OTHER))
    where = (tmp_path / "d", "eagle3", falling, {}, wide_target)
    assert "d2t: layout specu" in refusal(save_drafter, *where, layout="speculators")
    if importlib.util.find_spec("speculators"):
        read = importlib.import_module("speculators").SpeculatorModelConfig
        read = read.from_pretrained(tmp_path / "new")
        assert (read.norm_before_residual, read.target_vocab_size) == (False, whole["vocab_size"])


def test_pickles_are_copied_once(wide_target, files, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    expected = load_drafter(files, wide_target).params
    tensors = {name: torch.from_numpy(x.copy()) for name, x in tensors_of(files).items()}
    (files / "model.safetensors").unlink()
    torch.save(tensors, files / "pytorch_model.bin")
    unpickle.main([str(files), str(tmp_path / "new")])
    found = [load_drafter(folder, wide_target) for folder in (tmp_path / "new", files, files)]
    for drafter in found:
        assert drafter.config == EAGLE3
        jax.tree.map(np.testing.assert_array_equal, drafter.params, expected)
    assert found[1].folder == found[2].folder != files
    assert model_folder.public_name(found[1].folder) == files.name
    edit_json(files / "config.json", fc_norm=True)
    assert "lacks 3 tensors (fc_norm.0.weight" in refusal(load_drafter, files, wide_target)
    monkeypatch.setattr(torch, "__version__", "2.5.1+cpu")
    said = refusal(unpickle.main, [str(files), str(tmp_path / "other")])
    assert said == "torch 2.5.1+cpu may run code of a pickle; install torch 2.6 or later"
    monkeypatch.setattr(pickles, "has_torch", lambda: False)
    said = refusal(load_drafter, files, wide_target)
    assert said.startswith(f"{files} holds pytorch_model.bin but no safetensors, and only torch")
    assert "pip install torch, or run python -m infer.peers.unpickle" in said
    assert "torch is missing" in refusal(unpickle.main, [str(files), str(tmp_path / "other")])


class Evil:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def _cut(path):
    torch.save({"a": torch.ones(99)}, path)
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    "write, says",
    [
        (lambda path: path.write_text("<html>"), "is not a pickle of tensors alone"),
        (lambda path: torch.save({"a": Evil(path.with_name("ran"))}, path), "is not a pickle of"),
        (_cut, "is cut short or damaged; fetch it again"),
        (lambda path: torch.save({"epoch": 3}, path), "something else than tensors by name"),
    ],
)
def test_pickles_run_no_code_and_are_refused_in_our_words(tmp_path, write, says):
    path = tmp_path / "d" / "pytorch_model.bin"
    path.parent.mkdir()
    write(path)
    said = refusal(unpickle.main, [str(path.parent), str(tmp_path / "new")])
    assert said.startswith(str(path)) and says in said
    assert "weights_only" not in said and "torch.load" not in said
    left = [path.name for folder in (tmp_path, path.parent) for path in folder.iterdir()]
    assert left == ["d", "pytorch_model.bin"]  # nothing ran
