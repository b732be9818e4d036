"""Invalid settings raise an error of one line when the config is constructed."""

from __future__ import annotations

import dataclasses

import pytest

from configs import demo_target, tiny
from infer.cli.flags.config_file import read_config
from moa_jax.config import MAX_DEPTH, DistillConfig, DraftShape, PretrainConfig
from tests.model_folders import refusal

TARGET = demo_target.config.target
AT_LEAST_1 = {
    TARGET: ["vocab_size", "num_layers", "max_position_embeddings"],
    TARGET.block: ["hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size"],
    tiny.config: ["horizon"],
    tiny.config.drafter: [
        f"{part}_{size}"
        for part in ("self_attention", "cross_attention", "layer_self_attention")
        for size in ("num_key_value_heads", "intermediate_size")
    ],
    tiny.config.data: ["max_length", "row_length", "rows_per_batch"],
    tiny.config.optim: ["total_steps", "accumulate"],
    tiny.config.run: ["log_every", "eval_every", "eval_batches", "save_every", "keep_checkpoints"],
    DraftShape(5): ["depth", "breadth"],
}
AT_LEAST_0 = {
    tiny.config.drafter: ["target_layer_inference"],
    tiny.config.data: ["seed", "workers"],
    tiny.config.optim: ["warmup_steps", "decay_steps"],
}
CASES = [
    pytest.param(config, name, low, id=name)
    for low, table in enumerate((AT_LEAST_0, AT_LEAST_1))
    for config, names in table.items()
    for name in names
]


@pytest.mark.parametrize("config, name, low", CASES)
def test_counts_have_a_least_value_and_are_whole(config, name, low):
    dataclasses.replace(config, **{name: 2 if name == "head_dim" else low})
    for wrong in (low - 1, 1.5, "1", True):
        said = refusal(dataclasses.replace, config, **{name: wrong})
        assert said == f"{name} is {wrong!r}; choose a whole number of at least {low}"


def test_a_chain_has_an_end():
    assert DraftShape(MAX_DEPTH).num_drafted == MAX_DEPTH - 1
    assert f"choose at most {MAX_DEPTH}" in refusal(DraftShape, MAX_DEPTH + 1)
    said = refusal(dataclasses.replace, tiny.config, horizon=MAX_DEPTH)
    assert said == f"horizon is {MAX_DEPTH}; choose at most {MAX_DEPTH - 1}"


# ---- config files -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text, says",
    [
        ("config = (", "SyntaxError: "),
        ("\nconfig = Distil()", " line 2: NameError: name 'Distil' is not defined"),
        ("confg = 1", " defines no `config`; name a file with a PretrainConfig or DistillConfig"),
        ("import dataclasses, configs.tiny as t\n"
         "config = dataclasses.replace(t.config, horizon=0)", ": horizon is 0"),
    ],
)  # fmt: skip
def test_config_files_that_do_not_run_are_refused_in_one_line(tmp_path, text, says):
    path = tmp_path / "broken.py"
    path.write_text(text)
    said = refusal(read_config, str(path), PretrainConfig, DistillConfig)
    assert said.startswith(str(path)) and says in said
