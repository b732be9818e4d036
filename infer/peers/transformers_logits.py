"""Logits of transformers in float32, on the CPU or a GPU.

A separate program: reads a task as JSON from stdin, writes a document to stdout.

    in    {"model": a folder or a .gguf file, "sequences": [[id, ...]], "folder"}
    out   {"versions"}, and in the folder 0.npy, 1.npy, ...: the logits (T, V) per sequence
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers


def load(path: str | Path) -> Any:
    """Loads a float32 model for inference from a folder, or from a GGUF file by transformers."""
    path, file, kind = Path(path), {}, transformers.AutoModelForCausalLM
    if path.suffix == ".gguf":
        path, file = path.parent, {"gguf_file": path.name}
    elif hasattr(transformers.AutoConfig.from_pretrained(path), "vision_config"):
        kind = transformers.AutoModelForImageTextToText
    model = kind.from_pretrained(path, dtype=torch.float32, **file)
    return model.eval().requires_grad_(False)


@torch.inference_mode()
def main() -> None:
    task = json.load(sys.stdin)
    model = load(task["model"]).to("cuda" if torch.cuda.is_available() else "cpu")
    for index, tokens in enumerate(task["sequences"]):
        (logits_TV,) = model(torch.tensor([tokens], device=model.device)).logits
        np.save(Path(task["folder"], f"{index}.npy"), logits_TV.cpu().numpy())
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    print(json.dumps({"versions": versions}))


if __name__ == "__main__":
    main()
