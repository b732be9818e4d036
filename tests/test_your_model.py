"""The page on your own model: its commands run as printed, from prompts to a server."""

import json
import re
import subprocess
import sys

import pytest

from infer.info import ROOT
from tests.meeting import free_port

SHORT = "--max-prompt 200 --max-new-tokens 48"


@pytest.mark.slow
def test_the_commands_of_the_page_lead_from_prompts_to_an_answer(small_target, tmp_path):
    """The test uses a smaller target and smaller batches than the page; it needs curl and bash."""
    page = (ROOT / "train" / "your_model.md").read_text()
    script, _ = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    for ours, theirs in {
        "RUN=runs/mine": f"RUN={tmp_path}",
        "PORT=8000": f"PORT={free_port()}",
        "TARGET=moa_jax/demo/target": f"TARGET={small_target}",
        "$PWD/.venv/bin": sys.exec_prefix + "/bin",
        "--config configs/tiny.py": "--config configs/tiny.py --data.rows_per_batch 2",
        "--output $RUN/answers.jsonl": f"--output $RUN/answers.jsonl {SHORT}",
        "--output $RUN/validation.jsonl": f"--output $RUN/validation.jsonl {SHORT}",
        "--output $RUN/evaluation": "--output $RUN/evaluation --modes chain --max-new-tokens 32",
    }.items():
        assert script.count(ours) == 1, ours
        script = script.replace(ours, theirs)
    found = subprocess.run(
        ["bash", "-ec", script], cwd=ROOT, capture_output=True, text=True, timeout=900
    )
    assert found.returncode == 0, found.stderr
    *_, reply = [line for line in found.stdout.splitlines() if line.startswith("{")]
    (choice,) = json.loads(reply)["choices"]
    assert choice["message"]["content"]
    (report,) = tmp_path.glob("evaluation/**/report.json")
    drafted = [row for row in json.loads(report.read_text())["rows"] if row["model"] != "plain"]
    assert drafted and all(row["same_as_plain"] == row["questions"] for row in drafted)
    assert any(row["tau"] > 1 for row in drafted), "no draft was ever accepted"
