"""Bad flags of all programs: one line of the form `what failed: value; do this`, exit code 2."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest

from infer.bench.plan import decoding
from moa_jax.data.tokenizer import train_tokenizer
from tests.model_folders import edit_json, save_random_pair

TARGET = "--target TMP/target"
ASK = f"{TARGET} --draft TMP/draft --prompt-ids 5"
VLLM = f"{TARGET} --prompt-ids 5 --speculative-config"
PLAN = "--shape meta-llama/Meta-Llama-3-8B-Instruct"
RANDOM = "--random-weights configs/tiny.py"
RUN, WS = "--config configs/tiny.py", "--connect ws://127.0.0.1:1/"
WSS = WS.replace("ws:", "wss:")
CORPUS = "--prompts tests/data/conversations.jsonl"
MESH, MESH_LINE = "--mesh tensor=64", "mesh tensor=64,data=1 needs 64 devices, and there is one;"
WHOLE = "is not a whole number of at least 1"
STORE = "s3:// is no store that is known; use gs://, or mount it"

# Of each program: flags, and the beginning of the line.
BAD: dict[str, dict[str, str]] = {
    "infer.generate": {
        "--target TMP/none --prompt-ids 5": "TMP/none is not a folder; check the path",
        "--target TMP/silent --prompt Hi": "the target's folder has no tokenizer.json; use",
        f"{TARGET} --draft TMP/wide --prompt-ids 5": "TMP/wide: this drafter belongs to another",
        f"{TARGET} --prompt-ids 1,x": "argument --prompt-ids: '1,x' is not a list of token ids",
        f"{TARGET} --prompt-ids 300": "prompt 0 has the id 300, outside the vocabulary of 300; use",
        f"{TARGET} --prompts TMP/ids.jsonl": "TMP/ids.jsonl line 1: `prompt_ids` is not a list",
        f"{ASK} --max-new-tokens 500": "prompt 0 has 1 tokens and 500 are to follow, but the",
        f"{ASK} --max-new-tokens 0": f"argument --max-new-tokens: '0' {WHOLE}",
        f"{ASK} --depth 65": "depth is 65; choose at most 64",
        f"{ASK} --temperature -1": "temperature is -1.0; choose from 0.0 to",
        f"{ASK} --top-p 1.5": "top_p is 1.5; choose above 0 and at most 1",
        f"{ASK} --seed {2**32}": "argument --seed: seed is 4294967296; choose a whole number",
        f"{ASK} --stop-ids -1": "--stop-ids names the id -1, outside the target's vocabulary of",
        f"{ASK} --breadth 3": "--breadth describes a tree; use it with --mode tree",
        f"{ASK} --json --logprobs 21": "21 top tokens; choose from 0 to 20",
        f"{ASK} {MESH}": MESH_LINE,
        f"{VLLM} {{": "argument --speculative-config: not JSON (Expecting property name",
        f"""{VLLM} '{{"draft_k": 3}}'""": "--speculative-config: draft_k has no meaning here;",
        f"""{VLLM} '{{"model": "x"}}' --draft y""": "--speculative-config states model; leave",
        f"{TARGET} --method moa": "--method moa describes a drafter; name it with --draft",
        f"--pair demo {TARGET}": "--pair demo and --target TMP/target; leave one of them out",
    },
    "infer.bench": {
        "--modes plain,trees": "--modes plain,trees; choose from plain, chain, tree, auto",
        f"{RANDOM} --target t": "--random-weights needs no files; leave out --target and --draft",
        "--draft d": "--draft without --target: a drafter belongs to one target; name both",
        "--serve --rates 1,fast": "argument --rates: 'fast' is not a number above 0; see --help",
        "--serve --split": "--split and --serve are two benchmarks; choose one of them",
        "--split --profiles 6g": "--profiles 6g; choose from loopback, wired, 5g, 4g, far",
        "--split --draft lookup": "--draft lookup cannot write token by token, as chain asks;",
    },
    "infer.check": {
        "--reference TMP/none": "--reference TMP/none: no such file; give transformers or a",
    },
    "infer.evaluate": {
        "--suite nothing": "--suite nothing: no such set or file; choose from demo, paper",
    },
    "infer.convert": {
        f"{TARGET} --output TMP/new --to ours": "--to describes a drafter; name it with --draft",
        f"{TARGET} --output TMP/new --for-client": "--for-client describes a drafter; name it",
        f"{TARGET} --output TMP/draft": "TMP/draft exists already; choose another or add",
    },
    "infer.serve": {
        "--host 0.0.0.0": "--host 0.0.0.0 lets other machines in; give --api-key-file, or --open",
        "--api-key-file TMP/none": "cannot open TMP/none: no such file or directory; choose",
        "--api-key-file TMP/empty": "TMP/empty: it holds no keys; write one a line",
        "--api-key-file TMP/words": "TMP/words: keys are one a line, each one word of printable",
        "--tls-cert TMP/words": "TMP/words: no certificate with its key (",
        "--port 70000": "argument --port: '70000' is not a port from 0 to 65535; see --help",
        "--request-seconds 0": "argument --request-seconds: '0' is not a number above 0; see",
        "--ready-file TMP/none/x": "--ready-file TMP/none/x: no file can be written there; choose",
        "--port 0 --mode tree --sampled-drafts": "sampled candidates of a dynamic tree would be",
        "--port 0 --mode plain --max-prompt 5000": "--max-prompt 5000: prompts of at most 1023 to",
        "--port 0 --mode plain --max-tokens 1": "max_tokens is 1; choose from 2 to 1024, the",
        f"--port 0 {MESH}": MESH_LINE,
    },
    "infer.server": {
        "--host 0.0.0.0": "--host 0.0.0.0 lets other machines in; give --token-file, or --open",
        "--token-file TMP/empty": "TMP/empty: a token is one word of printable ASCII; write one",
        "--token-file TMP/words": "TMP/words: a token is one word of printable ASCII; write one",
        "--chunk 5000": "--chunk 5000: clients take at most 4096 at once; lower it",
        "--warm 1,9 --max-nodes 7": "--warm 9: drafts have at most 8 nodes with the root; lower it",
        """--speculative-config '{"num_speculative_tokens": 3}'""": "--speculative-config: num_",
        "--host nowhere.invalid --open": "--host nowhere.invalid: Name or service not known;",
    },
    "infer.client": {
        "": "one of the arguments --connect --offline is required; see --help",
        "--connect http://host/": "--connect http://host/; give ws://HOST:PORT/v1/split, or wss",
        f"{WSS} --tls-ca TMP/words": "TMP/words holds no certificate; give a PEM file",
        f"{WS} --tls-ca TMP/words": "--tls-ca is for wss:// servers; change --connect, or leave",
        f"{WS} --logit-bias 3:1": "logit_bias cannot be sent to a server; leave it out, or decode",
        "--offline --mode tree --depth 1": "--depth 1 drafts nothing; use --mode plain",
        "--offline --lengths 65": "argument --lengths: '65'; give numbers from 1 to 64; see --help",
    },
    "infer.info": {"--target TMP": "TMP/config.json is missing; check that TMP is a model folder"},
    "infer.plan": {
        "": "no --shape; name the target to plan for",
        f"{PLAN} --topology h200:8": "topology h200:8 has 8 devices, and decoding uses 1; name a",
    },
    "train.distill": {
        "--config TMP/none.py": "no such config file: TMP/none.py; see the folder configs/",
        f"{RUN} --run.sed 3": "no such setting: --run.sed; replace 'sed' by one of directory, log",
        f"{RUN} --run.seed -1": "seed is -1; choose a whole number of at least 0",
        f"{RUN} --output s3://bucket/x": f"s3://bucket/x: {STORE}",
    },
    "train.pretrain": {RUN: "configs/tiny.py defines a DistillConfig named `config`; name a file"},
    "train.regenerate": {
        "--prompts x --output y --shard 8/8": "argument --shard: '8/8' is no shard; write 0/8",
        f"{TARGET} {CORPUS} --output TMP/new --max-prompt 20 {MESH}": MESH_LINE,
    },
    "train.export": {f"{RUN} --output s3://bucket/x": f"s3://bucket/x: {STORE}"},
    "train.plot": {
        "TMP --output c.png": "TMP: has no metrics.jsonl of a run; name a run.directory",
    },
    "train.vocabulary": {
        f"{TARGET} --corpus c --size 0 --output TMP/v": f"argument --size: '0' {WHOLE}",
        f"{TARGET} --corpus TMP/half --size 9 --output TMP/v": "TMP/half/b.jsonl.partial cannot be",
    },
    "train.plan": {f"{RUN} --topology h100:x": "unknown topology 'h100:x'; name sides or GPUs of"},
    "infer.peers.unpickle": {"TMP TMP/new": "TMP holds no pytorch_model*.bin; name the folder"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Returns a random pair of 300 tokens and 256 positions with a tokenizer, and faulty files."""
    folder = tmp_path_factory.mktemp("pair")
    save_random_pair(folder, "llama", seed=5, vocab_size=300, num_hidden_layers=2)
    for name, source in (("silent", "target"), ("wide", "draft")):
        shutil.copytree(folder / source, folder / name)
    edit_json(folder / "wide" / "config.json", hidden_size=120)
    train_tokenizer(iter(["Good morning, how can I help?"] * 9), 290, folder / "tokenizer")
    for file in (folder / "tokenizer").iterdir():
        file.rename(folder / "target" / file.name)
    (folder / "half").mkdir()
    (folder / "half" / "b.jsonl.partial").write_text('{"text": "a"}\n')
    (folder / "words").write_text("two words\n")
    (folder / "ids.jsonl").write_text('{"prompt_ids": [1, "x"]}\n')
    (folder / "empty").write_text("\n")
    return folder


@pytest.mark.parametrize(
    "program, flags, line", [(name, *case) for name, cases in BAD.items() for case in cases.items()]
)
def test_bad_flags_are_one_line(run, folder, monkeypatch, program, flags, line):
    monkeypatch.setattr(decoding, "plan", None)  # nothing is compiled before flags are read
    done = run(program, *shlex.split(flags.replace("TMP", str(folder))))
    said = done.refusal().replace(str(folder), "TMP")
    name, _, notes = said.partition(": ")
    assert (name.split()[0], done.out) == (program, "") and notes.startswith(line) and "; " in notes
