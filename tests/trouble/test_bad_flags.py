"""Flags of every program that are refused: one line, exit code 2, nothing on stdout."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from infer.bench.plan import decoding
from moa_jax.data.tokenizer import train_tokenizer
from tests.model_folders import edit_json, save_random_pair

PAIR = "--target TMP/target --draft TMP/draft"
ASK = f"{PAIR} --prompt-ids 5"
PLAN = "--shape meta-llama/Meta-Llama-3-8B-Instruct"
CHAIN, PAPER = "--mode chain --drafter", "configs/moa_llama3_8b.py"
DEMO = "--shape moa_jax/demo/target"
RANDOM = "--random-weights configs/tiny.py"
MESH = "mesh tensor=64,data=1 needs 64 devices"
WHOLE = "is not a whole number of at least 1"
CHATS, MESH_64 = "tests/data/conversations.jsonl", "--mesh tensor=64"
RUN = "--config configs/tiny.py"


def speculate(more: str = "", **config: object) -> str:
    """Flags with vLLM's JSON, and more of them."""
    quoted = shlex.quote(json.dumps(config))
    return f"--target TMP/target --prompt-ids 5 --speculative-config {quoted} {more}"


# Of each program: flags and a part of the line. A dependency that a line calls missing is hidden.
BAD: dict[str, list[tuple[str, str]]] = {
    "infer.generate": [
        (f"{PAIR} --prompt-ids 1,x", "'1,x' is not a list of token ids"),
        (f"{PAIR} --prompt-ids 300", "outside the vocabulary of 300"),
        (f"{PAIR} --prompt-ids ''", "prompt 0 is empty"),
        (f"{PAIR} --prompt '  '", "prompt is empty"),
        (f"{PAIR} --prompts nowhere.jsonl", "nowhere.jsonl"),
        (f"{ASK} --max-new-tokens 500", "256 positions"),
        (f"{ASK} --max-new-tokens 0", f"'0' {WHOLE}"),
        (f"{ASK} --depth 0", f"'0' {WHOLE}"),
        (f"{ASK} --num-speculative-tokens -1", f"'-1' {WHOLE}"),
        (f"{ASK} --depth 65", "choose at most 64"),
        (f"{ASK} --num-speculative-tokens 65", "choose at most 64"),
        (f"{ASK} --temperature -1", "temperature is -1.0"),
        (f"{ASK} --top-p 0", "top_p is 0.0; choose above 0"),
        (f"{ASK} --top-p 1.5", "top_p is 1.5"),
        (f"{ASK} --logit-bias 5", "write ids and numbers"),
        (f"{ASK} --logit-bias 300:1", "names the id 300"),
        (f"{ASK} --stop ''", "never writes this text"),
        (f"{ASK} --stop '<|end|>'", "never writes this text"),
        (f"{ASK} --mode tree --breadth 301", "breadth 301 is more than"),
        (f"{ASK} --mode tree --total-tokens 0", "'0' is not a whole"),
        (f"{ASK} --breadth 3", "use it with --mode tree"),
        (f"{ASK} --mode tree --paths x --depth 3", "leave out --depth"),
        (f"{ASK} --mode tree --paths TMP/odd.json", "is no JSON list of paths"),
        (f"{ASK} --draft-vocabulary nowhere", "nowhere"),
        (f"{ASK} --json --compare", "leave out --json"),
        (f"{ASK} --speculate", "unrecognized arguments: --speculate"),
        (f"{ASK} --weights int4", "choose from 'int8', 'fp8'"),
        (f"{ASK} --weights fp8", "fp8 weights need an NVIDIA GPU"),
        (f"{ASK} --cache-rows 36", "a cache of 128 rows is too small"),
        (f"{ASK} --batch 2", "--batch 2 is for --json"),
        (f"{ASK} --logprobs 2", "--logprobs 2 is for --json"),
        (f"{ASK} --json --logprobs 21", "21 top tokens; choose from 0"),
        (f"{ASK} --presence-penalty 3", "presence_penalty is 3.0; choose from"),
        (f"{ASK} --stop-ids 2,300", "--stop-ids names the id 300"),
        (f"{ASK} --stop-ids -1", "--stop-ids names the id -1"),
        (f"{ASK} --check --sampled-drafts --temperature 1", "leave out"),
        (f"{ASK} --mesh tensor=64", MESH),
        *((f"{ASK} --seed {seed}", "seed") for seed in ("-2", 2**32, 2**64, "1.5", "x", "True")),
        ("--target TMP/target --speculative-config {", "not JSON"),
        (speculate(draft_k=3), "draft_k has no meaning"),
        (speculate(method=3), "method is 3; give text"),
        (speculate(model=None), "model is None; give text"),
        (speculate(num_speculative_tokens="4"), "is '4'; give a whole"),
        (speculate(num_speculative_tokens=True), "is True; give a whole"),
        (speculate(num_speculative_tokens=2.0), "is 2.0; give a whole"),
        (speculate(num_speculative_tokens=0), "is 0; give a whole"),
        (speculate("--depth 5", num_speculative_tokens=3), "leave out --depth"),
        (
            speculate("--num-speculative-tokens 5", num_speculative_tokens=3),
            "states num_speculative_tokens; leave out --num-speculative-tokens",
        ),
        (speculate("--method moa", method="moa"), "states method; leave out --method"),
        (speculate("--draft x", model="folder"), "states model; leave out --draft"),
        ("--target TMP/target --method moa", "--method moa describes a drafter; name it with"),
        ("--draft lookup --mode tree --prompt-ids 5", "drafts chains, no trees; use --mode chain"),
        ("--pair demo --target TMP/target", "leave one of them out"),
    ],
    "infer.bench": [
        ("--modes plain,trees", "choose from plain, chain, tree"),
        ("--tree 3,4", "three numbers"),
        ("--tree a,b", "--tree"),
        ("--simulate-acceptance 1.5", "--simulate-acceptance"),
        ("--repeats 0", "--repeats"),
        ("--modes chain --compare transformers", "lacks plain"),
        ("--random-weights x.py", "no such config file"),
        (f"{RANDOM} --target t", "leave out --target"),
        (f"{RANDOM} --conversations c", "no tokenizer"),
        ("--compare vllm", "choose from transformers"),
        ("--compare transformers --batch 2", "one prompt at a time"),
        ("--compare transformers --weights int8", "leave out --weights"),
        ("--weights-cost c.jsonl", "add --weights"),
        (f"--weights-cost c --weights int8 {RANDOM}", "--random-weights"),
        (f"{RANDOM} --weights fp8", "this device is cpu; choose int8"),
        ("--weights int8 --weights-cost /nowhere.jsonl", "/nowhere.jsonl"),
        ("--compare transformers", "torch is missing"),
        ("--draft d", "name both"),
        ("--tree 4,9999,9", "breadth 9999 is more than"),
        ("--batch 100", "6 prompts fill no batch of 100"),
        ("--max-new-tokens 5000", "positions"),
        ("--prompts /nowhere.jsonl", "/nowhere.jsonl"),
        ("--modes plain --cache-rows 32 --max-new-tokens 128", "cache of 128 rows is too small"),
        ("--modes chain --cache-rows 32 --max-new-tokens 128", "cache of 128 rows is too small"),
        ("--mesh tensor=64", MESH),
        ("--serve --rates 0", "'0' is not a number above 0"),
        ("--serve --rates 1,nan", "'nan' is not a number"),
        ("--serve --rates 1,fast", "'fast' is not a number"),
        ("--serve --rates 0.5x", "'0.5x' is not a number"),
        ("--serve --rates ,", "no rate"),
        ("--serve --seconds 2", "unrecognized arguments: --seconds"),
        ("--serve --modes plain,quick", "--modes plain,quick; choose from"),
        ("--serve --chain-depth 3", "unrecognized arguments: --chain-depth"),
        ("--serve --output x.json", "unrecognized arguments: --output"),
        ("--serve --temperature -1", "temperature is -1.0"),
        ("--serve --plot x.gif", "--plot x.gif"),
        ("--serve --split", "--split and --serve are two benchmarks"),
        ("--serve --sweep-depth 3", "unrecognized arguments: --sweep-depth"),
    ],
    "infer.check": [
        ("--reference /nowhere.jsonl", "no such file; give transformers or a golden file"),
        ("--reference README.md --prompt x", "brings its own prompts"),
        ("--reference README.md --write-golden g.jsonl", "leave out --prompt"),
        ("--reference README.md", "README.md"),
        ("--write-golden /nowhere/g.jsonl", "no file can be written there"),
        ("--write-golden g.jsonl --dtype bfloat16", "keeps a run in float32"),
        ("--write-golden g.jsonl --weights int8", "leave out --dtype and --weights"),
        ("--target t.gguf", "accelerate is missing"),
        ("--reference transformers", "torch is missing"),
    ],
    "infer.evaluate": [
        (f"{PAIR} --draft a=TMP/draft --draft a=TMP/draft", "two drafters are named a-chain"),
        (f"{PAIR} --draft a/b=c", "--draft a/b=c; write NAME=DIR"),
        (f"{PAIR} --draft a=b,k=2", "a=b,k=2: k is no option; choose from method, n"),
        (f"{PAIR} --draft a=b,n=x", "n=x is no number of layers"),
        (f"{PAIR} --modes chain,forest", "choose from chain, tree"),
        (f"{PAIR} --modes plain,chain", "nothing to compare"),
        (f"{PAIR} --modes chain --mode tree", "leave out --mode"),
        (f"{PAIR} --sources star", "--sources chooses among --conversations"),
        (f"--conversations {CHATS} --mode plain", "nothing to compare"),
        ("--conversations x --limit 0", "--limit"),
        ("--conversations x --max-prompt 0", "--max-prompt"),
        ("--conversations x --max-new-tokens 0", "--max-new-tokens"),
        ("--mesh tensor=64", MESH),
    ],
    "infer.convert": [
        (
            "--target TMP/target --output TMP/new --to ours",
            "--to describes a drafter; name it with",
        ),
        ("--target TMP/target --output TMP/new --method moa", "--method describes a drafter"),
        (
            "--target TMP/target --output TMP/new --target-layer-inference 0",
            "--target-layer-inference describes a drafter; name it with --draft",
        ),
    ],
    "infer.serve": [("--port 0 --mesh tensor=64", MESH)],
    "infer.server": [("--port 0 --mesh tensor=64", MESH)],
    "infer.plan": [
        ("", "no --shape; name the target to plan for"),
        ("--shape no/such/folder", "no/such/folder"),
        ("--shape Llama-3-8B", "no known shape: "),
        (f"{PLAN} --topology h100:1", "h100:1"),
        (f"{PLAN} --topology h200:8", "has 8 chips, and decoding uses 1; name"),
        (f"{PLAN} --topology v5e:4x4", "name a machine of 1, or add --mesh tensor=16"),
        (f"{PLAN} --mode tree", "name the drafter with --drafter"),
        (f"{PLAN} {CHAIN} configs/none.py", "no such config file"),
        (f"{PLAN} {CHAIN} moa_jax/demo/draft", "belongs to another"),
        (f"{DEMO} {CHAIN} {PAPER}", "vocab_size is 128256"),
        (f"{PLAN} --weights fp8 --topology v5e:1x1", "v5e:1x1 does not multiply it"),
        (f"{PLAN} --rows-used 2049", "--rows-used 2049 is more than the 2048 rows"),
        (f"{PLAN} {CHAIN} {PAPER} --depth 200 --cache-rows 8", "at most 64"),
        (f"{PLAN} {CHAIN} {PAPER} --breadth 2", "describes a tree"),
        (f"{PLAN} --drafter {PAPER}", "a draft without --mode, which is plain; add"),
        (f"{PLAN} --total-tokens 9", "a draft without --mode"),
        (f"{PLAN} --tau 10", "a round of 1 levels commits at most 1 tokens; lower it"),
        (
            f"{PLAN} --mode tree --drafter {PAPER} --cache-rows 8 --total-tokens 200",
            "a cache of 128 rows is too small",
        ),
        (
            f"{DEMO} --mode tree --drafter moa_jax/demo/draft --breadth 3000 --cache-rows 65536",
            "more than the 2048 tokens that can be drafted",
        ),
        (f"{PLAN} {CHAIN} {PAPER} --target-layer-inference 3", "sets it; leave the flag out"),
    ],
    "train.regenerate": [
        *(
            (f"--prompts x --output y --seed {seed}", "seed")
            for seed in ("-2", 2**32, 2**64, "1.5", "x", "True")
        ),
        (
            f"--prompts {CHATS} --output TMP/new --target TMP/target --max-prompt 20 {MESH_64}",
            MESH,
        ),
    ],
    "train.distill": [(f"{RUN} --run.seed {seed}", "seed") for seed in ("-1", 2**64, "1.5")],
}
CASES = [(program, *case) for program, cases in BAD.items() for case in cases]

# The ten commonest errors have a form: PROGRAM: what failed: value; do this.
COMMONEST = [
    ("infer.generate", "--target TMP/none --prompt-ids 5", "none"),
    ("infer.generate", "--target TMP/target --draft TMP/none --prompt-ids 5", "none"),
    ("infer.generate", "--target TMP/target --prompt-ids 5,x", "5,x"),
    ("infer.generate", "--target TMP/target --prompt-ids 5,99999", "99999"),
    ("infer.generate", "--target TMP/target --prompt-ids LONG", "positions"),
    ("infer.generate", "--target TMP/target --prompts TMP/none.jsonl", "none"),
    ("infer.generate", "--target TMP/silent --prompt Hello", "tokenizer.json"),
    ("infer.generate", "--target TMP/target --draft TMP/wide --prompt-ids 5", "hidden"),
    ("train.distill", "--config TMP/none.py", "none.py"),
    ("train.distill", f"{RUN} --run.sed 3", "run.sed"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A random pair whose target has 300 tokens, 256 positions and a tokenizer, and its faults."""
    folder = tmp_path_factory.mktemp("pair")
    save_random_pair(folder, "llama", seed=5, vocab_size=300, num_hidden_layers=2)
    for name, source in (("silent", "target"), ("wide", "draft")):
        shutil.copytree(folder / source, folder / name)
    width = json.loads((folder / "target" / "config.json").read_text())["hidden_size"]
    edit_json(folder / "wide" / "config.json", hidden_size=2 * width)
    train_tokenizer(iter(["Good morning, how can I help?"] * 9), 290, folder / "tokenizer")
    for file in (folder / "tokenizer").iterdir():
        file.rename(folder / "target" / file.name)
    (folder / "odd.json").write_text("[[0")
    return folder


def flags_of(line: str, folder: Path) -> list[str]:
    long = ",".join(["5"] * 257)
    return shlex.split(line.replace("TMP", str(folder)).replace("LONG", long))


@pytest.mark.parametrize("program, flags, line", CASES)
def test_bad_flags_are_one_line(run, folder, monkeypatch, program, flags, line):
    monkeypatch.setattr(decoding, "plan", None)  # nothing is compiled before flags are read
    if line.endswith(" is missing"):
        monkeypatch.setitem(sys.modules, line.split()[0], None)
    done = run(program, *flags_of(flags, folder))
    said = done.refusal()
    assert line in said and said.startswith(program) and not done.out, done.err


@pytest.mark.parametrize("program, flags, value", COMMONEST)
def test_a_common_error_says_what_failed_and_what_to_do(run, folder, program, flags, value):
    said = run(program, *flags_of(flags, folder)).refusal()
    assert re.fullmatch(rf"{re.escape(program)}: [^;]+; [a-z].+", said), said
    assert value in said
