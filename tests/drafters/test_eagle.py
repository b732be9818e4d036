"""EAGLE-1, 2 and 3: the authors' recorded numbers, a torch oracle, official files."""

import dataclasses
import functools
import json
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from infer import convert
from infer.cli.program import run
from infer.peers import unpickle
from moa_jax import Session, load_drafter, load_target
from moa_jax.config import (
    ChunkConfig,
    DraftShape,
    Eagle3Config,
    EagleConfig,
    FeedbackConfig,
    LossConfig,
    Objective,
)
from moa_jax.data.batch import Batch
from moa_jax.drafters import eagle, eagle3, eagle_common
from moa_jax.drafters.api import CandidateSampler
from moa_jax.pretrained import save_drafter
from moa_jax.training.distillation import tap
from tests.compare import assert_close, assert_norm_close, assert_value
from tests.conftest import arrays_of, golden_cases
from tests.drafting import (
    batch_of,
    calm_target_of,
    loss_and_gradient,
    make,
    recorded_training,
    stored,
    untrained,
)
from tests.model_folders import edit_json, edit_tensors, refusal, tensors_of
from tests.oracle import eagle as oracle
from tests.pairs import NO_STOP, prompts_of

IDS = tuple(range(3, 90, 2))
CONFIGS = {
    "eagle": EagleConfig(2, 44),
    "eagle-authors": EagleConfig(3, 36, input_norm=True, fc_bias=False, names="authors"),
    "eagle3": Eagle3Config(2, 44, draft_ids=IDS),
    "eagle3-whole": Eagle3Config(1, 36, tapped_layers=(0, 2, 4)),
}
recorded = pytest.mark.parametrize("folder", golden_cases("eagle_", "train.npz"))


@pytest.fixture(scope="module")
def calm_target(tmp_path_factory):
    """A calm target with layers enough for three that are tapped and some between them."""
    return calm_target_of(5, tmp_path_factory.mktemp("calm") / "target")


# ---- recorded cases -----------------------------------------------------------------------


@recorded
@pytest.mark.parametrize("noise", ["noise0", "noise1"])
def test_draft_loss_and_gradients(folder, noise):
    """The authors' loss, whose targets carry the noise too."""
    target, drafter, arrays, batch = recorded_training(folder)
    layer = eagle.layer(drafter.config, target.config)
    functions = make(target, drafter)
    objective = Objective()
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
            return eagle_common.loss_of(layer, objective, *given, inputs, jnp.float32(0))

        return jax.grad(loss, has_aux=True)(params)

    grads, parts = gradient(drafter.params, batch)
    for ours, theirs in (
        ("cross_entropy", "forward_KL"),
        ("feature_loss", "feature_loss"),
        ("loss", "loss"),
    ):
        assert_value(parts[ours], arrays[f"{noise}/{theirs}"], ours)
    if noise == "noise0":
        expected = arrays_of(folder / "grads.npz")
        for name, value in stored(target, drafter, grads).items():
            assert_norm_close(value, expected[f"noise0/{name}"], name)


SHAPES = {
    "d4b3t8": DraftShape(4, 3, 8),
    "d5b1t4": DraftShape(5),
    "d7b8t62": DraftShape(7, 8, 62),
}


@functools.cache
def loaded(folder):
    target = load_target(folder / "target", jnp.float32)
    return target, load_drafter(folder / "draft", target), arrays_of(folder / "generate.npz")


@pytest.mark.slow
@pytest.mark.parametrize("folder", golden_cases("eagle_", "generate.npz"))
@pytest.mark.parametrize("name", SHAPES)
def test_draft_accept_lengths_with_the_right_mask(folder, name):
    """Recorded beside those of the authors' mask, which tests/decode/test_trees.py compares."""
    target, drafter, arrays = loaded(folder)
    keys = [f"{which}/{name}/fixedmask_accept_len" for which, *_ in prompts_of(arrays)]
    if not set(keys) & set(arrays):
        pytest.skip("recorded with the authors' mask alone")
    session = Session(target, drafter, SHAPES[name])
    for key, (_, prompt, answer) in zip(keys, prompts_of(arrays), strict=True):
        (found,) = session.generate([prompt], len(answer), NO_STOP)
        assert found.token_ids == answer
        wanted = arrays[key].tolist()
        compared = min(len(found.accept_lengths), len(wanted)) - 1
        assert found.accept_lengths[:compared] == wanted[:compared]


# ---- any pair -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["eagle", "eagle3"])
def test_drafts_equal_the_oracle(calm_target, name, tmp_path):
    """Tokens and logits of a chain, from files of the official layout."""
    found = untrained(calm_target, name, CONFIGS[name], seed=3)
    grown = lambda leaf: leaf if leaf.ndim == 1 else 6 * leaf
    save_drafter(tmp_path / "d", name, found.config, jax.tree.map(grown, found.params), calm_target)
    drafter = load_drafter(tmp_path / "d", calm_target)
    weights = {k: torch.from_numpy(v.copy()) for k, v in tensors_of(tmp_path / "d").items()}
    assert drafter.config == found.config
    prompt = [5, 17, 60, 33, 9, 71, 12]
    reads = _reads(calm_target, _tapped(calm_target, drafter, _line(prompt[:-1])), 0)
    block = calm_target.config.block
    draft = oracle.draft_eagle if name == "eagle" else oracle.draft_eagle3
    sizes = (block.head_dim, block.rms_norm_eps, block.rope_theta)
    tokens, logits = draft(weights, reads, prompt, 4, *sizes)
    ours, logits_NV = _drafted(calm_target, drafter, prompt, 5)
    assert ours == tokens
    assert_close(logits_NV, logits.numpy(), "logits")


@pytest.mark.slow
@pytest.mark.parametrize("steps, chunk", [(2, 0), (3, 5)])
def test_training_time_test_equals_the_oracle(calm_target, steps, chunk, tmp_path):
    """Loss and gradients of conversations side by side, for a head that lacks some choices."""
    found = untrained(calm_target, "eagle3", CONFIGS["eagle3"], seed=5)
    grown = lambda leaf: leaf if leaf.ndim == 1 else 6 * leaf
    drafter = found._replace(params=jax.tree.map(grown, found.params))
    lengths = [[9, 7], [12]]  # of the conversations in each row
    batch = _packed(lengths, seed=7)
    objective = Objective(
        loss=LossConfig(token_weight=1.0),
        chunks=ChunkConfig(head=chunk),
        feedback=FeedbackConfig(steps=steps, decay=0.8),
    )
    parts, gradient = loss_and_gradient(calm_target, drafter, batch, objective)

    save_drafter(tmp_path / "d", "eagle3", drafter.config, drafter.params, calm_target)
    files = {name: torch.from_numpy(x.copy()) for name, x in tensors_of(tmp_path / "d").items()}
    learnt = {name: files[name].requires_grad_() for name in gradient}
    tapped, told = _tapped(calm_target, drafter, batch), []
    for row, sizes in enumerate(lengths):
        for start, size in zip(np.cumsum([0, *sizes]), sizes, strict=False):
            cut = (row, slice(start, start + size))
            tokens, answer = (x[cut].tolist() for x in (batch.tokens_BT, batch.response_BT))
            told.append(oracle.LearntConversation(tokens, _reads(calm_target, tapped, cut), answer))
    block = calm_target.config.block
    sizes = (block.head_dim, block.rms_norm_eps, block.rope_theta)
    expected = oracle.loss_eagle3(files, told, steps, 0.8, *sizes)
    assert_value(parts["loss"], expected.detach(), "loss")
    slopes = torch.autograd.grad(expected, list(learnt.values()))
    for name, slope in zip(learnt, slopes, strict=True):
        assert_norm_close(gradient[name], slope, name)


def _packed(lengths, seed):
    """Rows of conversations of these lengths, answers in two tokens of three."""
    T = max(map(sum, lengths))
    draw = np.random.default_rng(seed)
    segment_BT, position_BT = np.zeros((2, len(lengths), T), np.int32)
    for row, sizes in enumerate(lengths):
        segment_BT[row, : sum(sizes)] = np.repeat(np.arange(len(sizes)) + 1, sizes)
        position_BT[row, : sum(sizes)] = np.concatenate([np.arange(size) for size in sizes])
    tokens_BT = draw.integers(1, 100, segment_BT.shape).astype(np.int32) * (segment_BT > 0)
    response_BT = (draw.random(segment_BT.shape) < 2 / 3) & (segment_BT > 0)
    return Batch(*map(jnp.asarray, (tokens_BT, segment_BT, position_BT, response_BT)))


def _tapped(target, drafter, batch):
    functions = make(target, drafter)
    tapped = lambda batch: tap(target.config, functions, target.params, batch, jnp.float32)
    return jax.jit(tapped)(batch)


def _reads(target, tapped, cut):
    as_torch = lambda x: torch.from_numpy(np.array(x))
    streams = [as_torch(stream[cut]) for stream in tapped.streams]
    head = as_torch(target.params["lm_head"].T)
    embed = as_torch(target.params["embed"])
    return oracle.Reads(as_torch(tapped.hidden_BTD[cut]), streams, embed, head)


def _line(tokens):
    ones = np.ones((1, len(tokens)), np.int32)
    return batch_of(np.array([tokens]), ones, ones)


def _drafted(target, drafter, prompt, depth):
    """The first round's tokens and logits."""
    functions, verified = make(target, drafter), prompt[:-1]
    shared = functions.shared_params(target.params)
    tapped = _tapped(target, drafter, _line(verified))
    ids = functions.draft_ids

    @jax.jit
    def drafted(params, shared, tapped):
        cache = functions.init_cache(1, 16, jnp.float32)
        zero_B, tokens_BT = jnp.zeros(1, jnp.int32), jnp.array([verified])
        digest = functions.condense(params, zero_B, tapped)
        cache = functions.extend(params, shared, cache, tokens_BT, zero_B, digest)
        seen = []
        guide = CandidateSampler(
            lambda logits_BWU, _: seen.append(logits_BWU[0, 0]) or logits_BWU,
            None,
            None if ids is None else jnp.array(ids),
            target.config.vocab_size,
        )
        root = (jnp.array(prompt[-1:]), jnp.array([len(verified)]), DraftShape(depth), guide)
        tree, _ = functions.propose(params, shared, cache, *root)
        return tree.tokens_BN[0, 1:], jnp.stack(seen)

    tokens_N, logits_NU = drafted(drafter.params, shared, tapped)
    return tokens_N.tolist(), logits_NU


# ---- files --------------------------------------------------------------------------------


def test_draft_vocabulary_is_stored_beside_the_head(calm_target, tmp_path):
    found = untrained(calm_target, "eagle3", CONFIGS["eagle3"])
    save_drafter(tmp_path / "d", "eagle3", found.config, found.params, calm_target, jnp.bfloat16)
    tensors = tensors_of(tmp_path / "d")
    assert (tensors["d2t"] + np.arange(len(IDS))).tolist() == list(IDS)
    assert np.flatnonzero(tensors["t2d"]).tolist() == list(IDS)
    assert tensors["d2t"].dtype == np.int64 and tensors["t2d"].dtype == bool
    assert load_drafter(tmp_path / "d", calm_target).config.draft_ids == IDS


def test_wrong_files_are_refused(calm_target, tmp_path):
    found = untrained(calm_target, "eagle3", CONFIGS["eagle3"])
    save_drafter(tmp_path / "d", "eagle3", found.config, found.params, calm_target)
    edit_tensors(tmp_path / "d", drop="d2t")
    assert "no d2t says which" in refusal(load_drafter, tmp_path / "d", calm_target)
    edit_tensors(tmp_path / "d", d2t=np.zeros(len(IDS), np.int64) + 100)
    assert "d2t names" in refusal(load_drafter, tmp_path / "d", calm_target)
    wide = dataclasses.replace(found.config, tapped_layers=(1, 2, 9))
    assert "give three" in refusal(make, calm_target, found._replace(config=wide))


USUAL, OTHER = [2, 2, 2], [1, 2, 4]  # streams by the layer they enter; the target has five layers
TOP, BEFORE = eagle3.LAYER_IDS, [0, 1, 3]  # the layers that OTHER come out of


@pytest.fixture(scope="module")
def official(calm_target, tmp_path_factory):
    """An EAGLE-3 drafter's files as the official repository has them, without layer ids."""
    found = untrained(calm_target, "eagle3", CONFIGS["eagle3"])
    folder = tmp_path_factory.mktemp("official") / "d"
    save_drafter(folder, "eagle3", found.config, found.params, calm_target, layout="authors")
    edit_json(folder / "config.json", **{TOP: None, "eagle_config": None})
    return folder


def layered(official, tmp_path, stated):
    """A copy of these files whose config.json states layers."""
    folder = shutil.copytree(official, tmp_path / "d")
    edit_json(folder / "config.json", **stated)
    return folder


@pytest.mark.parametrize(
    "stated, layers",
    [
        ({}, ()),
        ({"eagle_config": {"use_aux_hidden_state": True}}, ()),
        ({"eagle_config": {TOP: [1, 1, 1]}}, ()),  # SpecForge, SGLang
        ({"eagle_config": {TOP: BEFORE}}, OTHER),
        ({"eagle_config": {TOP: USUAL}}, [3, 3, 3]),
        ({TOP: USUAL}, ()),  # speculators, vLLM
        ({TOP: OTHER}, OTHER),
        ({TOP: OTHER, "eagle_config": {TOP: BEFORE}}, OTHER),
        ({"eagle_config": {TOP: OTHER}, "method": "eagle3"}, OTHER),  # ours, as it was
        ({"eagle_config": {TOP: USUAL}, "method": "eagle3"}, ()),
    ],
)
def test_layers_are_counted_as_their_writers_do(calm_target, official, tmp_path, stated, layers):
    found = load_drafter(layered(official, tmp_path, stated), calm_target)
    assert found.config == dataclasses.replace(CONFIGS["eagle3"], tapped_layers=tuple(layers))
    of_others = bool(layers) and "method" not in stated
    assert [str(list(layers)) in notice for notice in found.notices] == [True] * of_others


@pytest.mark.parametrize("layout", ["ours", "authors"])
def test_layers_are_written_for_every_reader(calm_target, tmp_path, layout):
    config = dataclasses.replace(CONFIGS["eagle3"], tapped_layers=tuple(OTHER))
    found = untrained(calm_target, "eagle3", config)
    save_drafter(tmp_path / "d", "eagle3", config, found.params, calm_target, layout=layout)
    written = json.loads((tmp_path / "d" / "config.json").read_text())
    assert written[TOP] == OTHER and written["eagle_config"] == {TOP: BEFORE}
    assert load_drafter(tmp_path / "d", calm_target).config == config
    where = ["--target", str(calm_target.folder), "--draft", str(tmp_path / "d")]
    convert.main([*where, "--output", str(tmp_path / "ours")])
    assert load_drafter(tmp_path / "ours", calm_target).config == config


def test_pickles_are_rewritten_once(calm_target, tmp_path):
    found = untrained(calm_target, "eagle3", CONFIGS["eagle3"])
    save_drafter(tmp_path / "d", "eagle3", found.config, found.params, calm_target)
    tensors = {name: torch.from_numpy(x.copy()) for name, x in tensors_of(tmp_path / "d").items()}
    (tmp_path / "d" / "model.safetensors").unlink()
    torch.save(tensors, tmp_path / "d" / "pytorch_model.bin")
    unpickle.main([str(tmp_path / "d"), str(tmp_path / "new")])
    assert load_drafter(tmp_path / "new", calm_target).config == found.config


def test_pickles_that_differ_are_refused(tmp_path):
    (tmp_path / "d").mkdir()
    for number in (1, 2):
        torch.save({"a": torch.ones(3) * number}, tmp_path / "d" / f"pytorch_model-{number}.bin")
    said = refusal(unpickle.main, [str(tmp_path / "d"), str(tmp_path / "new")])
    assert "pytorch_model-2.bin: a differs" in said and not (tmp_path / "new").exists()


class Evil:
    """Unpickled, it leaves a file behind."""

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
        (Path.touch, "is empty; fetch it again"),
        (lambda path: path.write_text("<html>"), "is not a pickle of tensors alone"),
        (lambda path: torch.save({"a": Evil(path.with_name("ran"))}, path), "is not a pickle of"),
        (_cut, "is cut short or damaged; fetch it again"),
        (lambda path: torch.save([torch.ones(1)], path), "something else than tensors by name"),
        (lambda path: torch.save({"epoch": 3}, path), "something else than tensors by name"),
        (lambda path: torch.save({}, path), "something else than tensors by name"),
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


def test_the_converter_is_a_program_like_the_others(tmp_path, capsys, monkeypatch):
    with pytest.raises(SystemExit) as stopped:
        unpickle.main(["--version"])
    assert stopped.value.code == 0 and capsys.readouterr().out.startswith("moa-jax ")
    folders = [str(tmp_path), str(tmp_path / "new")]
    with pytest.raises(SystemExit) as stopped:
        run(unpickle.main, folders)
    said = f"infer.peers.unpickle: {tmp_path} holds no pytorch_model*.bin; "
    assert stopped.value.code == 2 and capsys.readouterr().err.startswith(said)
    (tmp_path / "pytorch_model.bin").touch()
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    assert "torch is missing" in refusal(unpickle.main, folders)
