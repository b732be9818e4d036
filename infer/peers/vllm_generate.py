"""Greedy decoding by vLLM, plain or with an EAGLE-3 drafter, one prompt at a time.

A separate program: reads a task as JSON from stdin, writes a document to stdout, and vLLM's log to
stderr. Chains only, since vLLM has no trees.

    in    {"folder", "draft": None or a folder in the layout `speculators`,
           "num_speculative_tokens", "prompts": [[id, ...]], "max_new_tokens", "stop_ids", "dtype",
           "repeats"}
    out   {"versions", "device", "threads", "peers": [{"peer", "acceptance_unconditional",
           "runs": [{"batch", "token_ids", "tokens", "seconds", "passes"}]}]}

`seconds` begin at the first token. `passes` and acceptance are vLLM's own counts of drafts and of
tokens accepted per position; unlike ours, these counts include the last round of an answer.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any, NamedTuple, TextIO

COUNT = "vllm:spec_decode_num_drafts"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_per_pos"


class Counts(NamedTuple):
    """Drafts so far, and how many of these accepted each position, (K,)."""

    drafts: int
    accepted_K: list[int]


def main() -> None:
    task, out = json.load(sys.stdin), _own_stdout()
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # an error is the last line
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
    import torch
    import transformers
    import vllm

    draft, on_cpu = task["draft"], not torch.cuda.is_available()
    speculative = {
        "method": "eagle3",
        "model": draft,
        "num_speculative_tokens": task["num_speculative_tokens"],
    }
    llm = vllm.LLM(
        model=task["folder"],
        dtype=task["dtype"],
        max_model_len=max(map(len, task["prompts"])) + task["max_new_tokens"] + 16,
        max_num_seqs=1,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        disable_log_stats=False,  # acceptance is read from the metrics
        enforce_eager=on_cpu,  # compiling takes longer than these answers
        speculative_config=speculative if draft else None,
    )
    sampling = vllm.SamplingParams(
        temperature=0.0,
        max_tokens=task["max_new_tokens"],
        stop_token_ids=task["stop_ids"],
        ignore_eos=True,
        detokenize=False,
    )
    name = f"vllm eagle3, {task['num_speculative_tokens']} drafts" if draft else "vllm"
    document = {
        "versions": {each.__name__: each.__version__ for each in (vllm, torch, transformers)},
        "device": "cpu" if on_cpu else torch.cuda.get_device_name(),
        "threads": torch.get_num_threads(),
        "peers": [{"peer": name, **_measure(llm, task, sampling)}],
    }
    print(json.dumps(document), file=out, flush=True)


def _own_stdout() -> TextIO:
    """Returns stdout, and sends all else that is written to it, as vLLM's log, to stderr."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return out


def _measure(llm: Any, task: dict[str, Any], sampling: Any) -> dict[str, Any]:
    """Runs every prompt `repeats` times, after a run of the first one that is not counted."""
    _run(llm, task["prompts"][0], sampling)
    before = _counts(llm)
    runs = [
        {"batch": index} | _run(llm, prompt, sampling)
        for _ in range(task["repeats"])
        for index, prompt in enumerate(task["prompts"])
    ]
    after = _counts(llm)
    drafts = max(1, after.drafts - before.drafts)
    pairs = zip(after.accepted_K, before.accepted_K or [0] * len(after.accepted_K), strict=True)
    return {"runs": runs, "acceptance_unconditional": [(b - a) / drafts for b, a in pairs]}


def _run(llm: Any, prompt: list[int], sampling: Any) -> dict[str, Any]:
    before = _counts(llm).drafts
    (answer,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
    token_ids, times = list(answer.outputs[0].token_ids), answer.metrics
    drafts = _counts(llm).drafts - before
    return {
        "token_ids": token_ids,
        "tokens": len(token_ids) - 1,
        "seconds": times.last_token_ts - times.first_token_ts,
        "passes": drafts or len(token_ids) - 1,
    }


def _counts(llm: Any) -> Counts:
    found = {metric.name: metric for metric in llm.get_metrics()}
    drafts, accepted = found.get(COUNT), found.get(ACCEPTED)
    return Counts(drafts.value if drafts else 0, list(accepted.values) if accepted else [])


if __name__ == "__main__":
    main()
