"""Rewrites a folder's pytorch_model*.bin as safetensors, for programs that read no pickles.

    python -m infer.peers.unpickle FOLDER NEW_FOLDER

Needs torch. `weights_only` prevents a pickle from running code. All files of the folder but weights
are copied. The new folder appears whole or not at all.
"""

from __future__ import annotations

from pathlib import Path

from infer.cli.program import Parser, local_path, run
from moa_jax.files.model_folder import PICKLES
from moa_jax.files.pickles import rewrite


def main(arguments: list[str] | None = None) -> None:
    parser = Parser("infer.peers.unpickle", __doc__)
    parser.add_argument("folder", metavar="FOLDER", type=Path, help=f"holds {PICKLES}")
    parser.add_argument("new_folder", metavar="NEW_FOLDER", type=local_path, help="is made")
    flags = parser.parse_args(arguments)
    count = rewrite(flags.folder, flags.new_folder)
    print(f"wrote {flags.new_folder / 'model.safetensors'} with {count} tensors")


if __name__ == "__main__":
    run(main)
