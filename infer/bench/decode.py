"""Measures plain, chain, tree and automatic decoding side by side: speed, acceptance, cost.

    python -m infer.bench
    python -m infer.bench --conversations data:chat/validation.jsonl --limit 30 --json
    python -m infer.bench --random-weights configs/moa_llama3_8b.py --simulate-acceptance 0.8
    python -m infer.bench --compare transformers
    python -m infer.bench --weights int8 --weights-cost data:chat/validation.jsonl
    python -m infer.bench --split --help      client and server over several networks instead
    python -m infer.bench --serve --help      infer.serve under load instead

All modes decode the same prompts greedily in one process. Each prompt goes through all modes
before the next one, another mode first each time, and its first time is not counted. Speedup is
over our own plain decoding. Tokens/s is the median over prompts and repeats of the tokens after
the first, over the seconds that they took. Phases are measured apart, in loops of their own, and
need not sum to a round.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax

from infer.documents import CODES, until_cut
from infer.flags import batches
from infer.flags.auto import costs_of, fill, fill_vocabularies, ways_of
from infer.flags.bench import Mode, check, modes_of, parser_of
from infer.flags.pair import AUTO, kind_of, load_pair
from infer.flags.vocabulary import source_of, vocabulary_of
from infer.peers import run_peer
from infer.program import progress
from moa_jax import InputError, Session, load_target
from moa_jax.decode.vocabulary import DraftVocabulary
from moa_jax.files.json_text import to_json
from moa_jax.measure import figures, phases, report
from moa_jax.measure.fidelity import fidelity
from moa_jax.measure.figures import Run
from moa_jax.measure.plot import plot_speedups
from moa_jax.measure.simulate import accept_with
from moa_jax.measure.traffic import copy_bandwidth
from moa_jax.measure.turns import in_turns
from moa_jax.model.sharding import mesh_of
from moa_jax.pretrained import LoadedDrafter, Target

NO_STOP: list[int] = []
COST_LIMIT = 100  # conversations of --weights-cost


class Bench(NamedTuple):
    """What is measured: a session for each mode, on the same batches of prompts."""

    modes: list[Mode]
    sessions: list[Session]
    batches: list[list[list[int]]]
    max_new_tokens: int
    stop_ids: list[int] | None


def main(arguments: list[str] | None = None) -> int | None:
    args = parser_of(__doc__).parse_args(arguments)
    check(args)
    args.mode = "plain" if args.modes == ["plain"] else None  # then no drafter is loaded
    target, drafter = batches.random_pair(args) if args.random_weights else load_pair(args)
    modes = modes_of(args, drafter)
    if args.draft_vocabulary is None and not args.random_weights:
        fill_vocabularies(target, drafter, args.weights)
    vocabulary = vocabulary_of(args, target, drafter)
    bench = Bench(
        modes,
        [_session(mode, target, drafter, vocabulary, args) for mode in modes],
        batches.batches_of(args, target),
        args.max_new_tokens,
        NO_STOP if args.ignore_stop or args.simulate_acceptance is not None else None,
    )
    for session in bench.sessions:
        for batch in bench.batches:
            session.check(batch, bench.max_new_tokens)
    cost = {"weights_cost": weights_cost(target, args)} if args.weights_cost else {}
    document = measure(bench, args) | cost
    print(to_json(document) if args.json else report.render(document))
    if args.plot:  # last, for a picture may fail
        plot_speedups(document["modes"], document["machine"]["device_kind"], Path(args.plot))
    return CODES[document["cut"]["by"]] if "cut" in document else None


def _session(
    mode: Mode,
    target: Target,
    drafter: LoadedDrafter | None,
    vocabulary: DraftVocabulary | None,
    args: argparse.Namespace,
) -> Session:
    if mode.name == "plain":
        return Session(target, cache_rows=args.cache_rows)
    rest: dict[str, Any] = {"cache_rows": args.cache_rows, "vocabulary": vocabulary}
    if mode.name == AUTO:
        rest["ways"] = ways_of(mode.shape, drafter)
        rest["costs"] = costs_of(target, drafter, vocabulary, args.weights)
    if args.simulate_acceptance is not None:
        rest["choose"] = accept_with(args.simulate_acceptance)
    return Session(target, drafter, mode.shape, **rest)


def measure(bench: Bench, args: argparse.Namespace) -> dict[str, Any]:
    """The document that --json prints; `modes` and `peers` hold one dictionary a row."""
    for session in bench.sessions:
        if session.chooser is not None:
            fill(session, args.batch, keep=args.simulate_acceptance is None)
    runs: list[list[Run]] = [[] for _ in bench.modes]
    with until_cut() as cut:
        run_in_turns(bench, args.repeats, runs)
    mark = cut.mark(sum(map(len, runs)), len(runs) * len(bench.batches) * args.repeats, " runs")
    if not all(runs):  # a mode without a run has no figures
        sys.exit(cut.code)
    compiled = [session.num_compiled for session in bench.sessions]
    bandwidth = copy_bandwidth()
    no_phases = args.no_phases or cut.error is not None
    has_phases = not no_phases and any(each.chooser is None for each in bench.sessions)
    if args.mesh and has_phases:
        print("--mesh: phases are measured on one device alone, and left out", file=sys.stderr)
    plain = next((r for m, r in zip(bench.modes, runs, strict=True) if m.name == "plain"), None)
    rows = []
    for mode, session, found, programs in zip(
        bench.modes, bench.sessions, runs, compiled, strict=True
    ):
        row = mode.sizes | figures.summarise(found, max(way.levels for way in session.ways))
        row |= figures.beside(found, plain) if plain else {"speedup": None}
        simulated = args.simulate_acceptance is not None and mode.name != "plain"
        row |= {"simulated": simulated, "num_compiled": programs}
        if simulated:
            row["same_as_plain"] = None  # dice chose the tokens
        if session.chooser is not None:
            row["costs"] = _table_of(session, args.batch)
        elif not no_phases and session.mesh is None:
            row |= _costs(bench, session, found, row, bandwidth)
            if mode.name == "plain" and args.batch == 1 and jax.default_backend() == "cpu":
                row |= _units(bench, session, row)
        rows.append(row)
    peers = _peers(bench, plain, args) if args.compare and not mark else []
    return {
        "modes": rows,
        "peers": peers,
        "settings": _settings(bench, args),
        "machine": _machine(bandwidth),
    } | mark


def _table_of(session: Session, batch: int) -> list[dict[str, Any]]:
    """What rounds cost in each way that a session chooses among."""
    rows = []
    for way in session.ways:
        ms = session.costs.ms(batch, way)
        rows.append(Mode(kind_of(way), way).sizes | {"batch": batch, "ms": ms})
    return rows


def weights_cost(target: Target, args: argparse.Namespace) -> dict[str, Any]:
    """How far the target's laws are from those of its stored weights, which are loaded for it.

    Raises InputError for a file without answers.
    """
    answers = batches.answers_of(args.weights_cost, target, args.limit or COST_LIMIT)
    texts = [(each.tokens_T, each.response_T) for each in answers]
    if not texts:
        raise InputError(f"--weights-cost {args.weights_cost}: there is no answer in it")
    mesh = mesh_of(target.params)
    stored = load_target(target.folder, target.params["embed"].dtype, mesh=mesh)
    return {"conversations": len(texts), **fidelity(stored, target, texts)._asdict()}


def run_in_turns(bench: Bench, repeats: int, runs: list[list[Run]]) -> None:
    """Appends the counted runs of each mode to `runs`."""
    turns = list(in_turns(len(bench.modes), len(bench.batches), repeats))
    with progress(len(turns), "runs") as bar:
        for turn in turns:
            if turn.is_counted:
                for each in bench.sessions:
                    each.background.wait()
            session, batch = bench.sessions[turn.way], bench.batches[turn.question]
            results = session.generate(batch, bench.max_new_tokens, bench.stop_ids)
            if turn.is_counted:
                runs[turn.way].append(Run(turn.question, tuple(results)))
            bar.step()


def _costs(
    bench: Bench, session: Session, runs: list[Run], row: dict[str, Any], bandwidth: float
) -> dict[str, Any]:
    """Phases, memory and transfers of one mode, on the batch that decoded longest."""
    longest = max(runs, key=lambda run: run.rounds)
    if longest.rounds < 2:
        return {}
    batch = bench.batches[longest.batch]
    found = phases.measure(session, batch, bench.max_new_tokens, bench.stop_ids, longest.rounds)
    prefill = phases.Phase(row["prefill_ms"] / 1e3, found.prefill_bytes)
    each = {
        name: {
            "ms": 1e3 * phase.seconds,
            "bytes": phase.bytes_read,
            "share_of_bandwidth": phase.bytes_read / phase.seconds / bandwidth,
        }
        for name, phase in {"prefill": prefill, **found.phases}.items()
    }
    held = found.weights_bytes + found.cache_bytes
    return {
        "phases": each,
        "sum_of_phases_ms": sum(1e3 * phase.seconds for phase in found.phases.values()),
        "host_ms_per_generation": 1e3 * found.host_s,
        "host_transfers_in_generation": found.host_transfers,
        "program_bytes": found.program_bytes,
        "weights_and_caches_bytes": held,
        "memory_over_weights_and_caches": found.program_bytes / held,
    }


def _units(bench: Bench, session: Session, row: dict[str, Any]) -> dict[str, Any]:
    """A plain round and passes over several rows in sweeps over the target's weights."""
    unit, passes = phases.in_units(session, bench.batches[0][0], bench.stop_ids)
    return {
        "unit_ms": 1e3 * unit,
        "round_units": row["ms_per_round"] / (1e3 * unit),
        "pass_units": {str(rows): units for rows, units in passes.items()},
    }


def _peers(bench: Bench, plain: list[Run], args: argparse.Namespace) -> list[dict[str, Any]]:
    """The same prompts in other software; where `plain_over_peer` is above 1, ours is faster."""
    target = bench.sessions[0].target
    stop_ids = target.generation.eos_ids if bench.stop_ids is None else bench.stop_ids
    task = {
        "folder": str(target.folder),
        "prompts": [batch[0] for batch in bench.batches],
        "max_new_tokens": bench.max_new_tokens,
        "stop_ids": list(stop_ids),
        "dtype": str(target.params["embed"].dtype),
        "repeats": args.repeats,
    }
    found = run_peer(args.compare, task)
    about = {key: found[key] for key in ("versions", "device", "threads")}
    return [report.peer_row(peer, plain) | about for peer in found["peers"]]


def _settings(bench: Bench, args: argparse.Namespace) -> dict[str, Any]:
    shown = ("max_new_tokens", "repeats", "batch", "threads", "random_weights")
    used = next((s.vocabulary for s in bench.sessions if s.vocabulary), None)  # by all that draft
    return {
        "target": str(args.target or args.random_weights or "bundled"),
        "draft": str(args.draft or args.random_weights or "bundled"),
        "dtype": str(bench.sessions[0].weights.target["embed"].dtype),
        "weights": args.weights,
        "mesh": args.mesh or None,
        "prompts": sum(map(len, bench.batches)),
        "prompt_tokens": [len(prompt) for batch in bench.batches for prompt in batch],
        "stop": "never" if bench.stop_ids == NO_STOP else "the target's end",
        "simulated_acceptance": args.simulate_acceptance,
        "cache_rows": bench.sessions[0].cache_rows,
        "draft_vocabulary": source_of(used),
    } | {key: getattr(args, key) for key in shown}


def _machine(bandwidth: float) -> dict[str, Any]:
    """The device, and the most memory this whole process had on it, where it keeps count."""
    device = jax.devices()[0]
    return {
        "device_kind": device.device_kind,
        "platform": device.platform,
        "devices": jax.device_count(),
        "jax": jax.__version__,
        "bandwidth_bytes_per_s": bandwidth,
        "peak_bytes_of_process": (device.memory_stats() or {}).get("peak_bytes_in_use"),
    }
