"""infer.bench --split: flags, what is counted over toy servers, its table."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer import bench
from infer.bench.split import run, table
from infer.bench.split.flags import parser_of
from infer.bench.split.pairs import SplitBench
from infer.cli.program import Progress
from infer.split_client.answering import SplitClient
from infer.split_client.drafter import PIECE
from infer.split_client.figures import figures_of, timed
from infer.split_client.state import AnswerEvent, ClientOptions
from moa_jax.config import MoaConfig, Sampling
from moa_jax.drafters import DRAFTERS
from moa_jax.pretrained import load_target, save_drafter
from tests.pairs import NO_STOP
from tests.split.split_client import ToyDrafter
from tests.split.split_server import PAIRING, plain
from tests.train.test_regenerate import save_talkative_target

PROMPTS = [[1, 2, 3], list(range(20)), [7] * 9, [5, 6]]
NEW = 24


def toy_bench(*modes: str, **flags) -> SplitBench:
    """What is measured, over a toy pair."""
    args = parser_of("").parse_args(["--codec", "float32", "--client-slowdown", "1"])
    vars(args).update({"max_new_tokens": NEW, "modes": list(modes)} | flags)
    drafter = SimpleNamespace(method="moa", folder=Path("toy"))
    own = [plain(prompt, args.max_new_tokens) for prompt in PROMPTS]
    target = SimpleNamespace(params={"embed": np.zeros(1, np.float32)}, folder=Path("toy"))
    return SplitBench(args, target, drafter, ToyDrafter(), PAIRING, 128, PROMPTS, own, [1.0])


def test_split_bench_counts_what_each_way_costs(server):
    found, differences = toy_bench("stream", "plain", "chain", "tree"), []
    profile = run.measure_network(found, "loopback", server.port, differences, Progress())
    assert not differences
    stream, one_by_one, chain, tree = profile["modes"]
    assert [row["mode"] for row in profile["modes"]] == ["stream", "plain", "chain", "tree"]
    assert all(row["same_as_plain"] == row["answers"] == 4 for row in profile["modes"])
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
    assert min(stream["speedup_over_plain"], one_by_one["speedup_over_stream"]) > 0


def test_split_bench_speedups_are_ratios_of_the_same_prompt():
    rates = lambda *values: [{"tokens_per_s": value} for value in values]
    found = run.ratios(rates(6.0, 9.0, None, 1.0), rates(2.0, 1.0, 5.0, 0.0))
    assert found == [3.0, 9.0]


def test_split_bench_tells_answers_that_differ(server):
    found, differences = toy_bench("chain"), []
    found.own[2][5] += 1
    profile = run.measure_network(found, "loopback", server.port, differences, Progress())
    assert differences == [{"profile": "loopback", "mode": "chain", "prompt": 2}]
    assert profile["modes"][0]["same_as_plain"] == 3
    assert profile["modes"][0]["speedup_over_stream"] is None  # which was not asked for


def test_split_first_tokens_of_a_drafter_alone_are_a_piece():
    async def work():
        with ThreadPoolExecutor(1) as worker:
            answering = SplitClient(ToyDrafter(), None, ClientOptions(), worker)
            events = answering.answer(PROMPTS[0], len(PROMPTS[0]) + NEW, NO_STOP, Sampling())
            times = await timed(answering, events)
            return times, figures_of(answering, PROMPTS[0], times)

    times, found = asyncio.run(work())
    assert times.count == PIECE < NEW == len(found["token_ids"])
    assert found["tokens_per_s"] == (NEW - PIECE) / found["decode_s"]
    nothing = SimpleNamespace(text=SimpleNamespace(answer=[]))
    times = asyncio.run(timed(nothing, no_events()))
    assert times.begin < times.first == times.end and not times.count


async def no_events() -> AsyncIterator[AnswerEvent]:
    """What comes of an answer that is lost before its first token."""
    yield AnswerEvent(0)


def test_split_bench_table_shows_all(server, monkeypatch):
    monkeypatch.setattr(run, "server", lambda flags: contextlib.nullcontext(server.port))
    flags = {"profiles": ["loopback", "4g"], "max_new_tokens": 16}
    made = json.loads(json.dumps(run.measure(toy_bench("stream", "chain", **flags))))
    assert not made["differences"] and made["settings"]["modes"] == ["stream", "chain"]
    shown = table.render(made)
    lines = [line for line in shown.splitlines() if line.startswith("|")]
    assert len(lines) == 2 + 4 and len({line.count("|") for line in lines}) == 1
    assert "| chain |" in shown and "4/4" in shown and "DIFFER" not in shown
    made["differences"] = [{"profile": "4g", "mode": "chain", "prompt": 0}]
    assert "1 answers DIFFER" in table.render(made)


def test_split_bench_that_is_interrupted_has_the_networks_so_far(server, monkeypatch):
    whole = run.measure_network

    def cut(bench, name, *rest):
        if name == "4g":
            raise KeyboardInterrupt
        return whole(bench, name, *rest)

    monkeypatch.setattr(run, "measure_network", cut)
    monkeypatch.setattr(run, "server", lambda flags: contextlib.nullcontext(server.port))
    flags = {"profiles": ["loopback", "4g"], "max_new_tokens": 16}
    made = run.measure(toy_bench("stream", **flags))
    assert [each["profile"] for each in made["profiles"]] == ["loopback"]
    assert "CUT by SIGINT after 1 of 2 networks." in table.render(made)


@pytest.mark.slow
def test_split_bench_end_to_end(tmp_path, capsys):
    """A small random pair, a server process and an emulated network."""
    target = load_target(save_talkative_target(tmp_path), jnp.float32)
    config = MoaConfig(2, 24, 2, 24, 2, 16)
    params = jax.jit(DRAFTERS["moa"].make(config, target.config).init)(jax.random.key(1))
    save_drafter(tmp_path / "draft", "moa", config, params, target)
    flags = f"--target {tmp_path / 'target'} --draft {tmp_path / 'draft'} --profiles wired "
    flags += "--prompts 1 --max-new-tokens 12 --lengths 2,3 --json"
    assert bench.main(f"--split {flags}".split()) == 0
    (profile,) = json.loads(capsys.readouterr().out)["profiles"]
    assert [row["mode"] for row in profile["modes"]] == ["stream", "plain", "chain"]
    assert all(row["same_as_plain"] == 1 for row in profile["modes"])
    assert profile["modes"][2]["target_passes"] <= 12
