"""Compares plain, chain, tree and automatic decoding: speed, acceptance and cost.

    python -m infer.bench
    python -m infer.bench --conversations data:chat/validation.jsonl --limit 30 --json
    python -m infer.bench --random-weights configs/moa_llama3_8b.py --simulate-acceptance 0.8
    python -m infer.bench --compare transformers
    python -m infer.bench --compare vllm --peer-python ENV/bin/python --target T --draft EAGLE3
    python -m infer.bench --weights int8 --weights-cost data:chat/validation.jsonl
    python -m infer.bench --split --help      client and server over several networks instead
    python -m infer.bench --serve --help      infer.serve under load instead

All modes decode the same prompts greedily in one process. Every prompt runs in all modes before
the next prompt, each time in a rotated order, and its first run is not counted. Speedup is relative
to this library's plain decoding. Tokens/s is the median over prompts and repeats of (tokens after
the first / their seconds). Phases are measured separately and need not sum to a round.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from infer.bench import decode_tables, inputs, phases
from infer.bench.fidelity import fidelity
from infer.bench.flags import Mode, check, modes_of, parser_of
from infer.bench.simulate import accept_with
from infer.bench.statistics import Run, beside, summarise
from infer.bench.traffic import copy_bandwidth
from infer.cli.documents import CODES, until_cut
from infer.cli.flags.auto import LENGTH, fill
from infer.cli.flags.pair import kind_of, load_pair, open_session
from infer.cli.flags.vocabulary import source_of, vocabulary_of
from infer.cli.program import progress
from infer.peers import run_peer
from moa_jax import InputError, Session, load_target
from moa_jax.decode.session import Result
from moa_jax.drafters import DRAFTERS
from moa_jax.files.json_text import to_json
from moa_jax.files.tensor_reader import GGUF_INDEX
from moa_jax.measure.turns import in_turns
from moa_jax.model.sharding import mesh_of
from moa_jax.pretrained import LoadedDrafter, Target, save_drafter

NO_STOP: list[int] = []
COST_LIMIT = 100  # conversations of --weights-cost


class MeasuredMode(NamedTuple):
    """A mode, its session and its counted runs."""

    mode: Mode
    session: Session
    runs: list[Run]


class Bench(NamedTuple):
    """All modes, and the batches of prompts that every mode decodes."""

    modes: list[MeasuredMode]
    batches: list[list[list[int]]]
    max_new_tokens: int
    stop_ids: list[int] | None


def main(arguments: list[str] | None = None) -> int | None:
    args = parser_of(__doc__).parse_args(arguments)
    check(args)
    args.mode = "plain" if args.modes == ["plain"] else None  # plain loads no drafter
    target, drafter = inputs.random_pair(args) if args.random_weights else load_pair(args)
    bench = _bench(args, target, drafter)
    cost = {"weights_cost": weights_cost(target, args)} if args.weights_cost else {}
    with tempfile.TemporaryDirectory() as scratch:
        tasks = peer_tasks(bench, drafter, args, Path(scratch))
        document = measure(bench, args, tasks) | cost
    print(to_json(document) if args.json else decode_tables.render(document))
    return CODES[document["cut"]["by"]] if "cut" in document else None


def _bench(args: argparse.Namespace, target: Target, drafter: LoadedDrafter | None) -> Bench:
    """Opens a session per mode; raises InputError for prompts that a session cannot decode."""
    modes = modes_of(args, drafter)
    rest = {"vocabulary": vocabulary_of(args, target, drafter), "cache_rows": args.cache_rows}
    chance = args.simulate_acceptance
    measured = []
    for mode in modes:
        flags = argparse.Namespace(**vars(args) | {"mode": mode.name})
        rest["choose"] = None if mode.name == "plain" or chance is None else accept_with(chance)
        session = open_session(flags, target, drafter, shape=mode.shape, **rest)
        measured.append(MeasuredMode(mode, session, []))
    stop_ids = NO_STOP if args.ignore_stop or chance is not None else None
    batches = inputs.batches_of(args, target)
    for each in measured:
        for batch in batches:
            each.session.check(batch, args.max_new_tokens)
    return Bench(measured, batches, args.max_new_tokens, stop_ids)


def measure(
    bench: Bench, args: argparse.Namespace, tasks: Sequence[dict[str, Any]]
) -> dict[str, Any]:
    """The document that --json prints; `modes` and `peers` hold one dictionary per row."""
    for each in bench.modes:
        if each.session.controller is not None:
            fill(each.session, args.batch, keep=args.simulate_acceptance is None)
    with until_cut() as cut:
        run_in_turns(bench, args.repeats)
    done = [len(each.runs) for each in bench.modes]
    mark = cut.mark(sum(done), len(done) * len(bench.batches) * args.repeats, " runs")
    if not all(done):  # a mode without runs has no figures
        sys.exit(cut.code)
    plain = next((each.runs for each in bench.modes if each.mode.name == "plain"), None)
    rows = [_row(each, plain, args) for each in bench.modes]
    bandwidth = copy_bandwidth()
    if args.mesh and not args.no_phases:
        print("--mesh: phases are measured on one device alone, and left out", file=sys.stderr)
    elif not args.no_phases and cut.error is None:
        for row, each in zip(rows, bench.modes, strict=True):
            row |= _phases(bench, each, row["prefill_ms"], bandwidth)
    return {
        "modes": rows,
        "peers": _peers(tasks, plain, args) if tasks and not mark else [],
        "settings": _settings(bench, args),
        "machine": _machine(bandwidth),
    } | mark


def run_in_turns(bench: Bench, repeats: int) -> None:
    """Adds the counted runs to all modes."""
    turns = list(in_turns(len(bench.modes), len(bench.batches), repeats))
    with progress(len(turns), "runs") as bar:
        for turn in turns:
            if turn.is_counted:
                for each in bench.modes:
                    each.session.background.wait()
            (_, session, runs), batch = bench.modes[turn.way], bench.batches[turn.question]
            results = session.generate(batch, bench.max_new_tokens, bench.stop_ids)
            if turn.is_counted:
                runs.append(Run(turn.question, tuple(results)))
            bar.step()


def _row(
    measured: MeasuredMode, plain: Sequence[Run] | None, args: argparse.Namespace
) -> dict[str, Any]:
    """The figures of a mode; for mode auto also its cost table in ms per round."""
    mode, session, runs = measured
    row = mode.sizes | summarise(runs, max(way.levels for way in session.ways))
    row |= beside(runs, plain) if plain else {"speedup": None}
    simulated = args.simulate_acceptance is not None and mode.name != "plain"
    row |= {"simulated": simulated, "num_compiled": session.num_compiled}
    if simulated:
        row["same_as_plain"] = None  # tokens were accepted at random
    if session.controller is not None:
        row["costs"] = [
            Mode(kind_of(way), way).sizes
            | {"batch": args.batch, "ms": session.costs.ms(args.batch, way, LENGTH)}
            for way in session.ways
        ]
    return row


def _phases(
    bench: Bench, measured: MeasuredMode, prefill_ms: float, bandwidth: float
) -> dict[str, Any]:
    """Phases of one mode, on the batch with the most rounds."""
    longest = max(measured.runs, key=lambda run: run.rounds)
    if measured.session.controller is not None or longest.rounds < 2:
        return {}
    task = bench.batches[longest.batch], bench.max_new_tokens, bench.stop_ids
    return phases.measure(measured.session, *task, longest.rounds, prefill_ms, bandwidth)


def weights_cost(target: Target, args: argparse.Namespace) -> dict[str, Any]:
    """Distance of the target's distributions from those with its weights as stored.

    Raises InputError for a file without answers.
    """
    answers = inputs.answers_of(args.weights_cost, target, args.limit or COST_LIMIT)
    texts = [(each.tokens_T, each.response_T) for each in answers]
    if not texts:
        raise InputError(
            f"--weights-cost {args.weights_cost}: no answer in it; name conversations with answers"
        )
    mesh = mesh_of(target.params)
    stored = load_target(target.folder, target.params["embed"].dtype, mesh=mesh)
    return {"conversations": len(texts), **fidelity(stored, target, texts)._asdict()}


def peer_tasks(
    bench: Bench, drafter: LoadedDrafter | None, args: argparse.Namespace, scratch: Path
) -> list[dict[str, Any]]:
    """The inputs of --compare's programs; the drafter is written to `scratch` for vLLM.

    Raises InputError for a GGUF target and for a drafter of another kind than EAGLE-3.
    """
    if not args.compare:
        return []
    target = bench.modes[0].session.target
    stop_ids = target.generation.eos_ids if bench.stop_ids is None else bench.stop_ids
    task = {
        "folder": str(target.folder),
        "prompts": [batch[0] for batch in bench.batches],
        "max_new_tokens": bench.max_new_tokens,
        "stop_ids": list(stop_ids),
        "dtype": str(target.params["embed"].dtype),
        "repeats": args.repeats,
    }
    if args.compare != "vllm":
        return [task]
    if (target.folder / GGUF_INDEX).is_file():
        raise InputError(
            f"--compare vllm: {target.folder.name} is a GGUF file; write a folder from it with "
            "infer.convert --target FILE.gguf --output DIR"
        )
    tasks = [task | {"draft": None, "num_speculative_tokens": 0}]
    depths = [each.mode.shape.depth for each in bench.modes if each.mode.name == "chain"]
    for depth in filter(lambda depth: depth > 1, depths):  # depth 1 is plain decoding
        if DRAFTERS[drafter.method].speculators is None:
            raise InputError(
                f"--compare vllm drafts by EAGLE-3 only, not by {drafter.method}; add --modes plain"
            )
        stored = (drafter.method, drafter.config, drafter.params, target, task["dtype"])
        save_drafter(scratch / "draft", *stored, layout="speculators", depth=depth)
        more = {"draft": str(scratch / "draft"), "num_speculative_tokens": depth - 1}
        tasks.append(task | more)
    return tasks


def _peers(
    tasks: Sequence[dict[str, Any]], plain: Sequence[Run], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """Figures of other software on the same prompts, each beside the first program's answers."""
    rows: list[dict[str, Any]] = []
    first: list[Run] = []
    for task in tasks:
        found = run_peer(args.compare, task, python=args.peer_python)
        about = {key: found[key] for key in ("versions", "device", "threads")}
        for peer in found["peers"]:
            runs = _runs_of(peer)
            first = first or runs
            same = {"same_as_first_peer": beside(runs, first)["same_as_plain"]}
            rows.append(peer_row(peer, runs, plain) | same | about)
    return rows


def _runs_of(peer: dict[str, Any]) -> list[Run]:
    """A peer's runs; a peer reports only the number of passes and the sum of their tokens."""
    runs = []
    for run in peer["runs"]:
        passes = run["passes"]
        lengths = [1] * (passes - 1) + [run["tokens"] - passes + 1] if passes else []
        result = Result([], run["token_ids"], "", lengths, 0.0, run["seconds"], [0] * passes)
        runs.append(Run(run["batch"], (result,)))
    return runs


def peer_row(peer: dict[str, Any], runs: Sequence[Run], plain: Sequence[Run]) -> dict[str, Any]:
    """Figures of other software; `plain_over_peer` > 1 means that our plain decoding is faster."""
    figures = summarise(runs, 1) | beside(runs, plain)
    kept = ("tokens_per_s", "tokens_per_s_quartiles", "tau", "same_as_plain", "answers")
    ratio = {"plain_over_peer": beside(plain, runs)["speedup"]}
    counted = {"acceptance_unconditional": peer.get("acceptance_unconditional") or None}
    return {"peer": peer["peer"]} | {key: figures[key] for key in kept} | ratio | counted


def _settings(bench: Bench, args: argparse.Namespace) -> dict[str, Any]:
    shown = ("weights", "max_new_tokens", "repeats", "batch", "threads", "random_weights")
    sessions = [each.session for each in bench.modes]
    used = next((s.vocabulary for s in sessions if s.vocabulary), None)  # of all drafters
    return {
        "target": str(args.target or args.random_weights or "bundled"),
        "draft": str(args.draft or args.random_weights or "bundled"),
        "dtype": str(sessions[0].weights.target["embed"].dtype),
        "mesh": args.mesh or None,
        "prompts": sum(map(len, bench.batches)),
        "prompt_tokens": [len(prompt) for batch in bench.batches for prompt in batch],
        "stop": "never" if bench.stop_ids == NO_STOP else "the target's end",
        "simulated_acceptance": args.simulate_acceptance,
        "cache_rows": sessions[0].cache_rows,
        "draft_vocabulary": source_of(used),
    } | {key: getattr(args, key) for key in shown}


def _machine(bandwidth: float) -> dict[str, Any]:
    """The device, and this process's peak device memory (None if not reported)."""
    device = jax.devices()[0]
    return {
        "device_kind": device.device_kind,
        "platform": device.platform,
        "devices": jax.device_count(),
        "jax": jax.__version__,
        "bandwidth_bytes_per_s": bandwidth,
        "peak_bytes_of_process": (device.memory_stats() or {}).get("peak_bytes_in_use"),
    }
