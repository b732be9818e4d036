"""Greedy decoding by transformers: plain `generate`, and `generate` with prompt lookup.

A separate program: reads a task as JSON from stdin, writes a document to stdout.

    in    {"folder", "prompts": [[id, ...]], "max_new_tokens", "stop_ids", "dtype", "repeats"}
    out   {"versions", "device", "threads", "peers": [{"peer", "runs": [{"batch", "token_ids",
           "tokens", "seconds", "passes"}]}]}

`seconds` begin at the end of the first pass, the prefill. `tokens` counts all tokens but the first,
even if prompt lookup gained several from the prefill. `passes` counts the passes after the prefill.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers

LINK = "model.gguf"  # in the folder of a GGUF file: `moa_jax.files.tensor_reader.GGUF_LINK`
WAYS = {
    "transformers generate": {},
    "transformers generate, prompt lookup": {"prompt_lookup_num_tokens": 10},
}


class Clock:
    """Counts passes of the model and records the time at which the first pass ended."""

    def __init__(self) -> None:
        self.passes, self.began = 0, 0.0

    def __call__(self, *_: Any) -> None:
        if not self.passes:
            _wait()
            self.began = time.perf_counter()
        self.passes += 1


def main() -> None:
    task = json.load(sys.stdin)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = getattr(torch, task["dtype"])
    file = {"gguf_file": LINK} if Path(task["folder"], LINK).is_file() else {}
    model = transformers.AutoModelForCausalLM.from_pretrained(task["folder"], dtype=dtype, **file)
    model = model.to(device).eval()
    clean = transformers.GenerationConfig(
        do_sample=False,
        use_cache=True,
        max_new_tokens=task["max_new_tokens"],
        eos_token_id=task["stop_ids"] or None,
        pad_token_id=0,
    )
    model.generation_config = clean  # not the model's own, which may sample
    found = [{"peer": name, "runs": _runs(model, task, ways)} for name, ways in WAYS.items()]
    document = {
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "threads": torch.get_num_threads(),
        "peers": found,
    }
    print(json.dumps(document))


def _runs(model: Any, task: dict[str, Any], ways: dict[str, Any]) -> list[dict[str, Any]]:
    """Runs every prompt `repeats` times, after a warm-up run that is not recorded."""
    runs = []
    for repeat in range(task["repeats"] + 1):
        for index, prompt in enumerate(task["prompts"]):
            run = {"batch": index} | _run(model, prompt, ways)
            runs += [run] if repeat else []
    return runs


@torch.inference_mode()
def _run(model: Any, prompt: list[int], ways: dict[str, Any]) -> dict[str, Any]:
    ids = torch.tensor([prompt], device=model.device)
    clock = Clock()
    hook = model.register_forward_hook(clock)
    found = model.generate(ids, attention_mask=torch.ones_like(ids), **ways)
    _wait()
    seconds = time.perf_counter() - clock.began
    hook.remove()
    token_ids = found[0, len(prompt) :].tolist()
    passes = clock.passes - 1
    return {
        "token_ids": token_ids,
        "tokens": len(token_ids) - 1,
        "seconds": seconds,
        "passes": passes,
    }


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
