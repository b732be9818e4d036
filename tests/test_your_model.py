"""The page on your own model: its commands run as printed, from prompts to a server."""

import json
import re
import subprocess
import sys

import pytest

from infer.info import ROOT
from tests.meeting import free_port


@pytest.mark.slow
def test_the_commands_of_the_page_lead_from_prompts_to_an_answer(tmp_path):
    """The test uses fewer conversations and tokens than the page; it needs curl and bash."""
    page = (ROOT / "train" / "your_model.md").read_text()
    script, _ = re.findall(r"```sh\n(.*?)```", page, re.DOTALL)
    for ours, theirs in {
        "RUN=runs/mine": f"RUN={tmp_path}",
        "PORT=8000": f"PORT={free_port()}",
        "$PWD/.venv/bin": sys.exec_prefix + "/bin",
        "head -n 32": "head -n 16",
        "tail -n 8": "tail -n 4",
        "--output $RUN/answers.jsonl": "--output $RUN/answers.jsonl --max-new-tokens 48",
        "--output $RUN/validation.jsonl": "--output $RUN/validation.jsonl --max-new-tokens 48",
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
