"""infer.bench: statistics and bytes computed by hand, simulated drafts, its JSON document."""

import functools
import json
import re
import shlex
import string
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from infer import bench
from infer.bench import decode_tables as report
from infer.bench import phases, random_pair, traffic
from infer.bench import statistics as figures
from infer.bench.flags import TREE, check, modes_of, parser_of
from infer.bench.statistics import Run
from infer.info import ROOT
from moa_jax import InputError, Result, load_drafter, load_target
from moa_jax.config import BlockConfig, Eagle3Config, MoaConfig, TargetConfig
from moa_jax.pretrained import save_drafter, save_target
from tests.model_folders import refusal

BLOCK = BlockConfig(16, 2, 1, 8, 24, 1e-5, 10000.0, None)
TARGET = TargetConfig("llama", 64, 3, BLOCK, False, 256)
DRAFT = MoaConfig(1, 24, 1, 24, 1, 16)


@functools.cache
def tiny() -> tuple:
    """Returns a random target and drafter without files."""
    target = random_pair.random_target(TARGET, jnp.float32, Path("tiny"))
    return target, random_pair.random_drafter("moa", DRAFT, target, jnp.float32)


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> list[str]:
    """Returns flags for the same pair as files, and three prompts of ids."""
    folder = tmp_path_factory.mktemp("pair")
    target, drafter = tiny()
    save_target(folder / "target", TARGET, target.params, dtype=jnp.float32)
    target = load_target(folder / "target", jnp.float32)
    save_drafter(folder / "draft", "moa", DRAFT, drafter.params, target)
    lines = [json.dumps({"prompt_ids": [i, 2, 3]}) for i in (1, 5, 9)]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    names = [str(folder / name) for name in ("target", "draft", "prompts.jsonl")]
    return ["--target", names[0], "--draft", names[1], "--prompts", names[2]]


# ---- statistics ---------------------------------------------------------------------------


def run_of(batch: int, seconds: float, lengths: list[int], drafted: int = 3, token: int = 1) -> Run:
    tokens = [token] * (1 + sum(lengths))
    drafts = [drafted] * len(lengths)
    return Run(batch, (Result([7], tokens, "length", lengths, 0.5, seconds, drafts),))


def test_figures_by_hand():
    plain = [run_of(0, 1.0, [1] * 6, 0), run_of(1, 2.0, [1] * 6, 0), run_of(0, 3.0, [1] * 6, 0)]
    fast = [run_of(0, 0.5, [4, 2]), run_of(1, 1.0, [1, 3, 2], token=2), run_of(0, 1.5, [4, 2])]
    found = figures.summarise(fast, 4)
    assert found["tokens_per_s"] == 6.0  # of 12, 6 and 4
    assert found["tokens_per_s_quartiles"] == [5.0, 9.0]
    assert (found["tokens"], found["rounds"]) == (18, 7)
    assert found["tau"] == pytest.approx(18 / 7)
    assert found["ms_per_round"] == pytest.approx(1000 / 3)  # of 250, 333 and 750
    assert found["prefill_ms"] == 500.0
    beside = figures.beside(fast, plain)
    # Batch 0: the median rates are 8 and 4; batch 1: 6 and 3.
    assert beside["speedup"] == pytest.approx(2.0)
    assert beside["speedup_of_totals"] == pytest.approx((18 / 3.0) / (18 / 6.0))
    assert (beside["same_as_plain"], beside["answers"]) == (1, 2)


def test_acceptance_by_hand():
    """Rounds accept 3, 1, 0 and 2 of 3, 3, 3 and 2 drafts; the limit truncates the last round."""
    result = Result([7], [1] * 12, "length", [4, 2, 1, 3, 1], 0.0, 1.0, [3, 3, 3, 2, 3])
    found = figures.acceptance([result], 4)
    assert found["acceptance_rate"] == 6 / 11
    assert found["acceptance_unconditional"] == [3 / 4, 2 / 4, 1 / 3]
    assert found["acceptance_conditional"] == [3 / 4, 2 / 3, 1 / 1]


# ---- bytes --------------------------------------------------------------------------------


def test_bytes_of_small_programs():
    held = {"w": jnp.zeros((4, 4)), "table": jnp.zeros((100, 4)), "unused": jnp.zeros(50)}
    held["four"] = jnp.zeros((4, 4, 4))
    rows = jnp.zeros((1, 4))

    def twice(held, x):
        return x @ held["w"] @ held["w"] + held["table"][jnp.array([3])]

    def in_branch(held, x):
        return jax.lax.cond(x[0, 0] > 0, lambda: twice(held, x), lambda: x)

    def written(held, x):
        table = jax.lax.dynamic_update_slice(held["table"], x, (x[0, 0].astype(int), 0))
        return x @ table.T

    def in_turns(held, x):
        return jax.lax.scan(lambda x, w: (x @ w @ held["w"], None), x, held["four"])[0]

    assert traffic.bytes_read(twice, held, rows) == 2 * 4 * 16
    assert traffic.bytes_read(in_turns, held, rows) == (4 + 4) * 4 * 16
    assert traffic.bytes_read(in_branch, held, rows) == 2 * 4 * 16
    assert traffic.bytes_read(jax.jit(written), held, rows) == 4 * 400


# ---- the program --------------------------------------------------------------------------


@pytest.fixture
def hasty(monkeypatch):
    """Shortens the measuring loops, because the tests do not compare times."""
    monkeypatch.setattr(phases, "SECONDS_A_LOOP", 0.01)
    monkeypatch.setitem(traffic.COPY_BYTES, "cpu", 1 << 20)


@pytest.mark.slow
def test_one_document_on_stdout(stored, capsys, hasty):
    flags = ["--modes", "plain,chain", "--chain-depth", "3", "--repeats", "1"]
    bench.main([*stored, *flags, "--max-new-tokens", "12", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found.keys() == {"modes", "peers", "settings", "machine"}
    plain, chain = found["modes"]
    assert (plain["mode"], plain["depth"], plain["tau"], plain["speedup"]) == ("plain", 1, 1.0, 1.0)
    assert (chain["mode"], chain["depth"], chain["same_as_plain"]) == ("chain", 3, 3)
    assert plain["tokens"] == chain["tokens"] == 3 * 11 and plain["rounds"] == 33
    assert chain["speedup"] > 0 and 1 <= chain["tau"] <= 3
    assert plain["phases"].keys() == {"prefill", "verify"}
    assert chain["phases"].keys() == {"prefill", "draft", "verify", "extend"}
    for row in found["modes"]:
        assert all(cost["ms"] > 0 and cost["bytes"] > 0 for cost in row["phases"].values())
    assert found["settings"]["prompts"] == 3 and found["machine"]["bandwidth_bytes_per_s"] > 0
    text = report.render(found)
    assert "| plain | " in text and "| chain 3 | extend |" in text


def test_random_weights_of_a_config(tmp_path, capsys, hasty):
    config = tmp_path / "small.py"
    config.write_text(
        "from configs import demo_target as d\nimport dataclasses\n"
        "from moa_jax.config import BlockConfig, TargetConfig\n"
        f"config = dataclasses.replace(d.config, target={TARGET!r})\n"
    )
    flags = ["--random-weights", str(config), "--prompt-length", "5", "--batch", "2"]
    flags += ["--modes", "plain", "--max-new-tokens", "6", "--repeats", "1", "--no-phases"]
    bench.main([*flags, "--cache-rows", "40", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["settings"]["prompt_tokens"] == [5, 5] and found["settings"]["batch"] == 2
    assert found["settings"]["cache_rows"] == 128  # of 40, rounded up
    assert found["modes"][0]["tokens"] == 10
    assert "RANDOM WEIGHTS" in report.render(found)
    with pytest.raises(InputError, match="describes a target and no drafter"):
        bench.main([*flags, "--modes", "plain,chain"])


@pytest.mark.slow
def test_simulated_acceptance_is_labelled(stored, capsys, hasty):
    flags = ["--modes", "chain", "--chain-depth", "4", "--simulate-acceptance", "1"]
    bench.main([*stored, *flags, "--max-new-tokens", "13", "--repeats", "1", "--no-phases"])
    text = capsys.readouterr().out
    assert "SIMULATED: drafts are accepted with probability 1.0" in text
    assert "| chain 4 (simulated) | " in text and "| 4.00 | 9 |" in text


@pytest.mark.slow
def test_the_cost_of_eight_bits_is_measured_on_answers(talkative, tmp_path, capsys, hasty):
    talk = [{"role": role, "content": "12345"} for role in ("user", "assistant")]
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": talk}) + "\n")
    flags = "--target target --modes plain --weights int8 --weights-cost chats.jsonl --limit 1"
    flags += " --prompts chats.jsonl --max-new-tokens 9 --repeats 1 --no-phases --json"
    places = {"target": talkative / "target", "chats.jsonl": tmp_path / "chats.jsonl"}
    bench.main([str(places.get(word, word)) for word in flags.split()])
    cost = json.loads(capsys.readouterr().out)["weights_cost"]
    assert cost["tokens"] > 2 and 0 < cost["mean_kl"] < 0.1


def test_modes_of_flags():
    def shapes(*flags: str) -> list[tuple]:
        args = parser_of(None).parse_args(list(flags))
        modes = modes_of(args, drafter)
        return [(m.name, m.shape.depth, m.shape.breadth, m.shape.total_tokens) for m in modes]

    drafter, chain = tiny()[1], ("chain", 5, 1, None)
    assert shapes() == [("plain", 1, 1, None), chain, ("tree", *TREE), ("auto", *chain[1:])]
    assert shapes("--modes", "chain", "--chain-depth", "3") == [("chain", 3, 1, None)]
    assert shapes("--modes", "tree", "--tree", "4,4,9") == [("tree", 4, 4, 9)]
    drafter = load_drafter("lookup", tiny()[0])  # it drafts no trees
    assert [mode for mode, *_ in shapes()] == ["plain", "chain", "auto"]


def test_commands_of_the_gpu_script_parse():
    """The script runs seldom, and a mistyped flag would end its whole run."""
    values = {"batch": "8", "dtype": "bfloat16", "chance": "0.2"}
    script = (ROOT / ".ci" / "gpu").read_text().replace("\\\n", " ")
    commands = re.findall(r"-m infer\.bench ([^>|\n]*)", script)
    assert len(commands) == 5
    for command in commands:
        args = parser_of(None).parse_args(shlex.split(string.Template(command).substitute(values)))
        check(args)
        assert args.json


# ---- refusals and peers -------------------------------------------------------------------


@pytest.mark.slow
def test_transformers_writes_the_same(stored, capsys, hasty):
    flags = ["--modes", "plain", "--repeats", "1", "--max-new-tokens", "24", "--no-phases"]
    bench.main([*stored, *flags, "--compare", "transformers", "--json"])
    peers = json.loads(capsys.readouterr().out)["peers"]
    assert [peer["same_as_plain"] for peer in peers] == [3, 3]
    assert peers[0]["tau"] == 1.0 and peers[1]["tau"] > 1.0


VLLM = """
import json, pathlib, sys
task = json.load(sys.stdin)
draft = task["draft"] and pathlib.Path(task["draft"], "config.json").read_text()
run = {"token_ids": [1] * 9, "tokens": 8, "seconds": 1.0, "passes": 4 if draft else 8}
peer = {"peer": draft and json.loads(draft)["speculators_model_type"], "runs": []}
peer["runs"] = [{"batch": index} | run for index in range(len(task["prompts"]))]
peer["acceptance_unconditional"] = [0.5] * task["num_speculative_tokens"]
print(json.dumps({"versions": {}, "device": "cpu", "threads": 2, "peers": [peer]}))
"""


@pytest.mark.slow
def test_another_python_runs_vllm_plain_and_with_our_drafter(stored, tmp_path, capsys, hasty):
    fake = tmp_path / "python"
    fake.write_text(f"#!{sys.executable}{VLLM}")
    fake.chmod(0o755)
    flags = ["--modes", "plain,chain", "--chain-depth", "3", "--repeats", "1", "--no-phases"]
    flags += ["--max-new-tokens", "9", "--compare", "vllm", "--peer-python", str(fake), "--json"]
    assert "by EAGLE-3 only, not by moa; add --modes" in refusal(bench.main, [*stored, *flags])
    target, config = load_target(stored[1]), Eagle3Config(1, 24, tapped_layers=(0, 1, 2))
    drafter = random_pair.random_drafter("eagle3", config, target, jnp.float32)
    save_drafter(tmp_path / "d", "eagle3", config, drafter.params, target)
    bench.main([*stored, "--draft", str(tmp_path / "d"), *flags])
    plain, chain = json.loads(capsys.readouterr().out)["peers"]
    assert (plain["peer"], plain["tau"], plain["acceptance_unconditional"]) == (None, 1.0, None)
    assert (chain["peer"], chain["tau"], chain["same_as_first_peer"]) == ("eagle3", 2.0, 3)
    assert chain["acceptance_unconditional"] == [0.5, 0.5]
