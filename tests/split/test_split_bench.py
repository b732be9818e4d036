"""infer.bench --split: counts over toy servers, its table, and one real network."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from infer import bench
from infer.bench.split import run, table
from infer.bench.split.flags import parser_of
from infer.bench.split.pairs import SplitBench
from infer.cli.program import Progress
from tests.split.split_client import ToyDrafter
from tests.split.split_server import PAIRING, plain

PROMPTS = [[1, 2, 3], list(range(20)), [7] * 9, [5, 6]]
NEW = 24


def toy_bench(*modes: str, **flags) -> SplitBench:
    """Returns the benchmark of a toy pair."""
    args = parser_of("").parse_args(["--codec", "float32", "--client-slowdown", "1"])
    vars(args).update({"max_new_tokens": NEW, "modes": list(modes)} | flags)
    drafter = SimpleNamespace(method="moa", folder=Path("toy"))
    own = [plain(prompt, args.max_new_tokens) for prompt in PROMPTS]
    target = SimpleNamespace(params={"embed": np.zeros(1, np.float32)}, folder=Path("toy"))
    return SplitBench(args, target, drafter, ToyDrafter(), PAIRING, 128, PROMPTS, own, [1.0])


def test_split_bench_counts_the_costs_of_each_mode_and_answers_that_differ(server):
    found, differences = toy_bench("stream", "plain", "chain", "tree"), []
    found.own[2][5] += 1
    profile = run.measure_network(found, "loopback", server.port, differences, Progress())
    stream, one_by_one, chain, tree = profile["modes"]
    modes = [row["mode"] for row in profile["modes"]]
    assert modes == ["stream", "plain", "chain", "tree"]
    wrong = [(each["mode"], each["prompt"]) for each in differences]
    assert sorted(wrong) == sorted((mode, 2) for mode in modes)
    assert all((row["same_as_plain"], row["answers"]) == (3, 4) for row in profile["modes"])
    assert all(row["tokens"] == 4 * NEW for row in profile["modes"])

    assert stream["server_calls"] == 2 and one_by_one["server_calls"] == NEW
    assert stream["target_passes"] == one_by_one["target_passes"] == NEW
    assert stream["tau"] == one_by_one["tau"] == 1
    for drafted in (chain, tree):
        assert drafted["tau"] > 1.3 and drafted["target_passes"] < NEW
    assert stream["drafting_s"] == 0
    assert stream["bytes_up"] < one_by_one["bytes_up"]
    assert stream["bytes_down"] < one_by_one["bytes_down"]  # which has rows
    assert stream["speedup_over_stream"] == one_by_one["speedup_over_plain"] == 1


def test_split_bench_table_shows_all(server, monkeypatch):
    monkeypatch.setattr(run, "server", lambda flags: contextlib.nullcontext(server.port))
    flags = {"profiles": ["loopback", "wired"], "max_new_tokens": 16}
    made = json.loads(json.dumps(run.measure(toy_bench("stream", "chain", **flags))))
    assert not made["differences"] and made["settings"]["modes"] == ["stream", "chain"]
    shown = table.render(made)
    assert shown.count("4/4") == 4 and "DIFFER" not in shown
    made["differences"] = [{"profile": "wired", "mode": "chain", "prompt": 0}]
    assert "1 answers DIFFER" in table.render(made)


@pytest.mark.slow
def test_split_bench_end_to_end(capsys):
    """The bundled pair, a server process and an emulated network."""
    flags = "--profiles wired --prompts 1 --max-new-tokens 12 --lengths 2,3 --json"
    assert bench.main(f"--split {flags}".split()) == 0
    (profile,) = json.loads(capsys.readouterr().out)["profiles"]
    assert [row["mode"] for row in profile["modes"]] == ["stream", "plain", "chain"]
    assert all(row["same_as_plain"] == 1 for row in profile["modes"])
    assert profile["modes"][2]["target_passes"] <= 12
