"""Every program that decodes takes --mesh: what it says is what one device says."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from infer.info import ROOT
from moa_jax import Session, load_target
from tests.infer.mesh_run import PROMPT

NEW = 9
CHAT = {"messages": [{"role": r, "content": "12345"} for r in ("user", "assistant")]}


@pytest.fixture(scope="module")
def folder(talkative, tmp_path_factory) -> Path:
    """A small random pair and a conversation."""
    folder = tmp_path_factory.mktemp("pair")
    for name in ("target", "draft"):
        (folder / name).symlink_to(talkative / name)
    (folder / "chats.jsonl").write_text(json.dumps(CHAT) + "\n")
    return folder


@pytest.fixture(scope="module")
def told(folder) -> dict[str, tuple[int, str, str]]:
    """Exit codes, stdout and stderr of the programs, in one process of two devices."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.infer.mesh_run", str(folder)],
        **dict(cwd=ROOT, env=os.environ, text=True, capture_output=True, timeout=900),
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def plain(folder: Path, prompt: list[int]) -> list[int]:
    (row,) = Session(load_target(folder / "target", jnp.float32)).generate([prompt], NEW, [])
    return row.token_ids


@pytest.mark.slow
def test_bench(told):
    code, out, err = told["bench"]
    assert code == 0, err
    found = json.loads(out)
    assert found["settings"]["mesh"] == {"tensor": 2}
    assert [row["same_as_plain"] for row in found["modes"]] == [1, 1]
    assert found["weights_cost"]["tokens"] > 2 and 0 < found["weights_cost"]["mean_kl"] < 0.1
    assert not any("phases" in row for row in found["modes"])
    assert "--mesh: phases are measured on one device alone, and left out" in err.splitlines()


@pytest.mark.slow
def test_regenerate(told, folder):
    code, _, err = told["regenerate"]
    assert code == 0, err
    (row,) = map(json.loads, (folder / "new.jsonl").read_text().splitlines())
    assert row["token_ids"] == plain(folder, row["prompt_ids"])


@pytest.mark.slow
def test_server(told, folder):
    code, out, err = told["server"]
    assert code == 0, err
    _, document = out.splitlines()  # the first says where the server listens
    (row,) = json.loads(document)["results"]
    prompt = [int(part) for part in PROMPT.split(",")]
    assert row["token_ids"] == plain(folder, prompt)
