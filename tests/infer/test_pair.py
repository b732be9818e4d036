"""The flags of a pair: vLLM's JSON, prompt lookup, draft shapes, CPU cores."""

from __future__ import annotations

import argparse
import json

import pytest

from infer.cli import program
from infer.cli.flags import pair
from moa_jax.config import DraftShape
from tests.model_folders import refusal


def parse(*flags: str) -> argparse.Namespace:
    parser = program.Parser("infer.toy")
    pair.add_pair_flags(parser)
    pair.add_draft_flags(parser)
    return parser.parse_args(flags)


def loading(monkeypatch, *flags: str) -> argparse.Namespace:
    """Returns the flags after `load_pair` has read them, without loading the pair."""

    def stop(*_, **__):
        raise InterruptedError

    monkeypatch.setattr(pair, "load_target", stop)
    args = parse(*flags)
    with pytest.raises(InterruptedError):
        pair.load_pair(args)
    return args


def speculative(**config: object) -> tuple[str, str]:
    return "--speculative-config", json.dumps(config)


def test_vllms_json_is_spread_over_our_flags(monkeypatch):
    config = speculative(method="moa", model="folder", num_speculative_tokens=3)
    args = loading(monkeypatch, "--target", "x", *config)
    assert (args.method, args.draft, pair.shape_of(args, None).depth) == ("moa", "folder", 4)


def test_a_target_alone_gets_prompt_lookup_unless_drafting_is_split(monkeypatch, capsys):
    for flags in ((), ("--mode", "auto"), ("--mode", "chain"), ("--method", "lookup")):
        assert loading(monkeypatch, "--target", "x", *flags).draft == "lookup"
    notice = "no --draft: prompt lookup drafts for x (--mode plain turns it off)"
    assert capsys.readouterr().err.splitlines() == [notice] * 3  # none for an explicit lookup
    assert loading(monkeypatch, "--target", "x", "--mode", "plain").draft is None
    assert loading(monkeypatch).draft is None  # the bundled pair
    assert capsys.readouterr().err == ""
    for kind in ("split", "for_client"):
        said = refusal(pair.load_pair, parse("--target", "x"), **{kind: True})
        assert said == "--target without --draft; name its drafter"


def test_tree_flags(tmp_path):
    shape = lambda *flags: pair.shape_of(parse("--mode", "tree", *flags), 4)
    assert shape() == DraftShape(7, 8, 62) and pair.shape_of(parse(), None) == DraftShape(5)
    assert shape("--depth", "3", "--breadth", "2", "--total-tokens", "5") == DraftShape(3, 2, 5)
    (tmp_path / "tree.json").write_text("[[0], [1], [0, 0]]")
    static = DraftShape.static([[0], [1], [0, 0]])
    assert shape("--paths", str(tmp_path / "tree.json")) == static
