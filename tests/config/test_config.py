"""Settings that cannot mean anything: refused where they are made, in one line."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from configs import demo_target, tiny
from infer.cli.flags.config_file import read_config
from moa_jax import config
from moa_jax.config import MAX_DEPTH, DistillConfig, DraftShape, PretrainConfig
from moa_jax.training.optim import schedule
from tests.model_folders import refusal
from train.run.settings import load_config

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


def test_a_schedule_without_warm_up_or_decay_is_constant():
    optim = dataclasses.replace(tiny.config.optim, warmup_steps=0, decay_steps=0)
    assert [schedule(optim)(step) for step in range(3)] == pytest.approx([1e-4] * 3)


def test_a_chain_has_an_end():
    assert DraftShape(MAX_DEPTH).num_drafted == MAX_DEPTH - 1
    assert f"choose at most {MAX_DEPTH}" in refusal(DraftShape, MAX_DEPTH + 1)


def test_a_drafter_is_trained_for_no_longer_a_chain():
    """Its folder states a depth, one above the horizon, and is held to the same limit."""
    dataclasses.replace(tiny.config, horizon=MAX_DEPTH - 1)
    said = refusal(dataclasses.replace, tiny.config, horizon=MAX_DEPTH)
    assert said == f"horizon is {MAX_DEPTH}; choose at most {MAX_DEPTH - 1}"


@pytest.mark.parametrize("module", [config.model, config.draft, config.train])
def test_the_package_has_the_classes_of_its_modules(module):
    """Whoever adds a config to one of them adds its name to moa_jax/config/__init__.py."""
    found = (x for x in vars(module).values() if isinstance(x, type))
    classes = [x for x in found if x.__module__ == module.__name__]
    assert classes and all(getattr(config, x.__name__) is x for x in classes)


# ---- config files -------------------------------------------------------------------------


def load(path: Path, text: str, *overrides: str) -> DistillConfig:
    path.write_text(text)
    return load_config(str(path), DistillConfig, list(overrides))


@pytest.mark.parametrize(
    "text, says",
    [
        ("config = (", "SyntaxError: "),
        ("import no_such_module", " line 1: ModuleNotFoundError: No module named"),
        ("\nconfig = Distil()", " line 2: NameError: name 'Distil' is not defined"),
        ("config = 1 / 0", " line 1: ZeroDivisionError: division by zero"),
        ("import json\nconfig = json.loads('{')", " line 2: JSONDecodeError: "),
        ("import dataclasses, configs.tiny as t\n"
         "config = dataclasses.replace(t.config, horizon=0)", ": horizon is 0"),
    ],
)  # fmt: skip
def test_config_files_that_do_not_run_are_refused_in_one_line(tmp_path, text, says):
    path = tmp_path / "broken.py"
    said = refusal(load, path, text)
    assert said.startswith(str(path)) and says in said


def test_a_config_file_has_a_config_of_the_asked_kinds(tmp_path):
    path = tmp_path / "a.py"
    read = lambda *kinds: read_config(str(path), *kinds)
    path.write_text("from configs.tiny import config")
    assert read(PretrainConfig, DistillConfig) == tiny.config
    assert "defines a DistillConfig named `config`; name a file with a Pretrain" in refusal(
        read, PretrainConfig
    )
    path.write_text("confg = 1")
    said = refusal(read, PretrainConfig, DistillConfig)
    assert said == f"{path} defines no `config`; name a file with a PretrainConfig or DistillConfig"


def test_overrides_are_held_to_the_same_rules(tmp_path):
    text = "from configs.tiny import config"
    assert load(tmp_path / "a.py", text, "--run.log_every", "3").run.log_every == 3
    said = refusal(load, tmp_path / "a.py", text, "--run.log_every", "0")
    assert said == "log_every is 0; choose a whole number of at least 1"
