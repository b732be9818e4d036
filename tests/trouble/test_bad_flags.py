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
TALKS = "moa_jax/demo/conversations.jsonl"
VOCABULARY = f"{TARGET} --corpus {TALKS} --size 9 --output TMP/v"
ANSWERS = f"{TARGET} --prompts {TALKS} --output TMP/new --max-prompt 20"
PLACE = "--prompt x --processes 2 --coordinator"
MESH, MESH_LINE = "--mesh tensor=64", "mesh tensor=64,data=1 needs 64 devices, and there is one;"
WHOLE = "is not a whole number of at least 1"
STORE = "s3:// is no store that is known; use gs://, or mount it"
GS, URL = "--output gs://bucket/x", "argument --output: gs://bucket/x is a URL, and files are"

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
        f"{ASK} --dept 3": "unrecognized arguments: --dept 3; see --help",
        f"{ASK} --temperature -1": "temperature is -1.0; choose from 0.0 to",
        f"{ASK} --seed {2**32}": "argument --seed: seed is 4294967296; choose a whole number",
        f"{ASK} --stop-ids -1": "--stop-ids names the id -1, outside the target's vocabulary of",
        f"{ASK} --breadth 3": "--breadth describes a tree; use it with --mode tree",
        f"{ASK} --json --logprobs 21": "21 top tokens; choose from 0 to 20",
        f"{ASK} {MESH}": MESH_LINE,
        f"{VLLM} {{": "argument --speculative-config: not JSON (Expecting property name",
        f"""{VLLM} '{{"draft_k": 3}}'""": "--speculative-config: draft_k has no meaning here;",
        f"""{VLLM} '{{"model": "x"}}' --draft y""": "--speculative-config states model; leave",
        f"{TARGET} --method moa": "--method moa describes a drafter; name it with --draft",
        "--distributed --prompt x": "--distributed: no launcher says where the other processes are",
        "--process 1 --prompt x": "--coordinator, --processes and --process go together; give all",
        f"{PLACE} localhost --process 0": "--coordinator localhost; write HOST:PORT, as in",
        f"{PLACE} host:99999 --process 0": "--coordinator host:99999; write HOST:PORT",
        f"{PLACE} host:1 --process 2": "--process 2; choose from 0 to 1",
        f"--pair demo {TARGET}": "--pair demo and --target TMP/target; leave one of them out",
    },
    "infer.bench": {
        "--modes plain,trees": "--modes plain,trees; choose from plain, chain, tree, auto",
        f"{RANDOM} --target t": "--random-weights needs no files; leave out --target and --draft",
        "--draft d": "--draft without --target: a drafter belongs to one target; name both",
        "--compare vllm": "--compare vllm: vllm is missing; pip install it into another",
        "--peer-python python": "--peer-python runs --compare; add it",
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
        f"{TARGET} {GS}": URL,
    },
    "infer.convert": {
        f"{TARGET} --output TMP/new --to ours": "--to describes a drafter; name it with --draft",
        f"{TARGET} --output TMP/draft": "TMP/draft exists already; choose another or add",
        f"{TARGET} {GS}": URL,
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
        "--port 0 --mode plain --chat-template TMP/jinja": "--chat-template is not Jinja (unexp",
        """--port 0 --default-chat-template-kwargs '{"tools": 1}'""": "--default-chat-template-kw",
    },
    "infer.server": {
        "--host 0.0.0.0": "--host 0.0.0.0 lets other machines in; give --token-file, or --open",
        "--token-file TMP/empty": "TMP/empty: a token is one word of printable ASCII; write one",
        "--chunk 5000": "--chunk 5000: clients take at most 4096 at once; lower it",
        f"--port 0 {MESH}": MESH_LINE,
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
        "--config TMP/none.py": "no such config file: TMP/none.py; see the folder ",
        f"{RUN} --run.sed 3": "no such setting: --run.sed; replace 'sed' by one of directory, log",
        f"{RUN} --run.seed -1": "seed is -1; choose a whole number of at least 0",
        f"{RUN} --optim.total_steps many": "--optim.total_steps: 'many'; write a value of type int",
        f"{RUN} --optim.total_steps": "--optim.total_steps; give it a value, as in --optim.total_",
        f"{RUN} --data.answers all": "--data.answers: 'all'; choose from turns, reference",
        f"{RUN} --target.size 3": "--target.size: 'target' is not a group; write --target VALUE",
        f"{RUN} 7": "7 is not an override; write one such as --optim.total_steps 20",
        f"{RUN} --data.cache gs://bucket/x": "data.cache: gs://bucket/x is a URL, and files are",
        f"{RUN} --output s3://bucket/x": f"s3://bucket/x: {STORE}",
    },
    "train.pretrain": {RUN: "configs/tiny.py defines a DistillConfig named `config`; name a file"},
    "train.regenerate": {
        "--prompts x --output y --shard 8/8": "argument --shard: '8/8' is no shard; write 0/8",
        f"{TARGET} --prompts x {GS}": URL,
        f"{ANSWERS} {MESH}": MESH_LINE,
        f"{ANSWERS}999": "--max-prompt 20999 and --max-new-tokens",
        f"{ANSWERS} --limit 5 --shard 5/9": f"{TALKS}: no records of any source in shard 5/9; name",
        f"{ANSWERS} --sources z": f"{TALKS}: no records of z there; name others",
        f"{ANSWERS} --model m": "--model is for --endpoint only; leave it out",
        f"{ANSWERS} --endpoint http://h --draft d": "--draft is not for --endpoint; leave it out",
    },
    "train.corpus": {"--records c --output c --sources a=0": f"argument --sources: '0' {WHOLE}"},
    "train.plot": {
        "TMP --output c.png": "TMP: has no metrics.jsonl of a run; name a run.directory",
        f"TMP {GS}": URL,
    },
    "train.vocabulary": {
        f"{TARGET} --corpus c --size 1 {GS}": URL,
        f"{TARGET} --corpus c --size 1 --output TMP/words": "TMP/words exists already; remove it",
        f"{TARGET} --corpus c --size 301 --output TMP/v": "a draft vocabulary of 301: the target",
        f"{VOCABULARY} --sources z": f"{TALKS}: no records of z; name another",
        f"{TARGET} --corpus TMP/ids.jsonl --size 9 --output TMP/v": "TMP/ids.jsonl: none of 1 rec",
        f"{TARGET} --corpus TMP/half --size 9 --output TMP/v": "TMP/half/b.jsonl.partial cannot be",
    },
    "train.plan": {f"{RUN} --topology h100:x": "unknown topology 'h100:x'; name sides or GPUs of"},
    "infer.peers.unpickle": {
        "TMP TMP/new": "TMP holds no pytorch_model*.bin; name the folder",
        "TMP gs://bucket/x": "argument NEW_FOLDER: gs://bucket/x is a URL, and files are written",
    },
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
    (folder / "jinja").write_text("{{ messages }")
    (folder / "words").write_text("two words\n")
    (folder / "ids.jsonl").write_text('{"prompt_ids": [1, "x"]}\n')
    (folder / "empty").write_text("\n")
    return folder


@pytest.mark.parametrize(
    "program, flags, line", [(name, *case) for name, cases in BAD.items() for case in cases.items()]
)
def test_bad_flags_are_one_line(run, folder, monkeypatch, program, flags, line):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.setattr(decoding, "plan", None)  # nothing is compiled before flags are read
    done = run(program, *shlex.split(flags.replace("TMP", str(folder))))
    said = done.refusal().replace(str(folder), "TMP")
    name, _, notes = said.partition(": ")
    assert (name.split()[0], done.out) == (program, "") and notes.startswith(line) and "; " in notes
