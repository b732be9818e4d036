"""The ten commonest errors, each one line: PROGRAM: what failed: value; do this."""

from __future__ import annotations

import json
import re

import pytest

COMMONEST = {
    "no target": ("infer.generate --target {p}/none --prompt-ids 5", "none"),
    "no drafter": ("infer.generate --target {p}/target --draft {p}/none --prompt-ids 5", "none"),
    "no token ids": ("infer.generate --target {p}/target --prompt-ids 5,x", "5,x"),
    "unknown token": ("infer.generate --target {p}/target --prompt-ids 5,99999", "99999"),
    "long prompt": ("infer.generate --target {p}/target --prompt-ids {long}", "positions"),
    "no file of prompts": ("infer.generate --target {p}/target --prompts {p}/none.jsonl", "none"),
    "no tokenizer": ("infer.generate --target {p}/target --prompt Hello", "target"),
    "wrong pair": ("infer.generate --target {p}/small --draft {p}/draft --prompt-ids 5", "hidden"),
    "no config": ("train.distill --config {p}/none.py", "none.py"),
    "unknown setting": ("train.distill --config configs/tiny.py --run.sed 3", "run.sed"),
}


@pytest.mark.parametrize("name", COMMONEST)
def test_an_error_says_what_failed_and_what_to_do(run, pair, name):
    config = json.loads((pair / "target" / "config.json").read_text())
    if name == "wrong pair":
        (pair / "target").rename(pair / "small")
        drafter = json.loads((pair / "draft" / "config.json").read_text())
        drafter["hidden_size"] = 2 * config["hidden_size"]
        (pair / "draft" / "config.json").write_text(json.dumps(drafter))
    line, value = COMMONEST[name]
    long = ",".join(["5"] * (config["max_position_embeddings"] + 1))
    program, *flags = line.format(p=pair, long=long).split()
    said = run(program, *flags).refusal()
    assert re.fullmatch(rf"{re.escape(program)}: [^;]+; [a-z].+", said), said
    assert value in said
