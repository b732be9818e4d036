"""Every program that decodes accepts --mesh, and prints the output of one device."""

import json
import subprocess
import sys

import jax.numpy as jnp
import pytest

from infer.info import ROOT
from moa_jax import Session, load_target
from tests.infer.mesh_run import PROMPT

CHAT = {"messages": [{"role": r, "content": "12345"} for r in ("user", "assistant")]}


@pytest.mark.slow
def test_programs_on_a_mesh_print_what_one_device_prints(talkative, tmp_path):
    for name in ("target", "draft"):
        (tmp_path / name).symlink_to(talkative / name)
    (tmp_path / "chats.jsonl").write_text(json.dumps(CHAT) + "\n")
    command = [sys.executable, "-m", "tests.infer.mesh_run", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    done_by_name = json.loads(done.stdout)
    assert [code for code, *_ in done_by_name.values()] == [0, 0, 0], done_by_name
    session = Session(load_target(talkative / "target", jnp.float32))
    plain = lambda prompt: session.generate([prompt], 9, [])[0].token_ids

    found = json.loads(done_by_name["bench"][1])
    assert found["settings"]["mesh"] == {"tensor": 2}
    assert [row["same_as_plain"] for row in found["modes"]] == [1, 1]
    assert found["weights_cost"]["tokens"] > 2 and 0 < found["weights_cost"]["mean_kl"] < 0.1
    assert (
        "--mesh: phases are measured on one device alone, and left out" in done_by_name["bench"][2]
    )

    (row,) = map(json.loads, (tmp_path / "new.jsonl").read_text().splitlines())
    assert row["token_ids"] == plain(row["prompt_ids"])

    _, document = done_by_name["server"][1].splitlines()  # the first line has the server's address
    (row,) = json.loads(document)["results"]
    assert row["token_ids"] == plain([int(part) for part in PROMPT.split(",")])
