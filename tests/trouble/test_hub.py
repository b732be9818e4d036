"""Model cards, and pushes to a stand-in of the hub: one commit, or one line per fault."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
from huggingface_hub import constants, metadata_load
from huggingface_hub.utils import _http

from moa_jax.files.model_folder import file_hash
from tests.train.fake_endpoint import Handler, served
from tests.train.test_training import changed, distill_config
from train.export import card_of

URL = "https://huggingface.co/me/mine"
NAMES = {"README.md": "regular", "config.json": "regular", "model.safetensors": "lfs"}


class HubHandler(Handler):
    """Answers every call of a push with the fields of all calls, and keeps the commits.

    It has all large files already, by their sha256.
    """

    def do_POST(self) -> None:
        hub, data = self.endpoint, self.rfile.read(int(self.headers["Content-Length"] or 0))
        if hub.fault(self):
            return
        lines = [json.loads(line) for line in data.splitlines()]
        if "/commit/" in self.path:
            hub.commits.append(lines)
        asked = lines[0] if lines else {}
        for file in asked.get("files", ()):
            file |= {"uploadMode": NAMES[file["path"]], "shouldIgnore": False}
        self.reply(200, asked | hub.info)

    do_GET = do_POST


@pytest.fixture
def hub(monkeypatch):
    info = {"id": "me/mine", "private": True, "siblings": [], "tags": ["moa-jax"], "url": URL}
    info |= {"commitUrl": f"{URL}/commit/0", "commitOid": "0" * 40}
    found = SimpleNamespace(info=info, commits=[], fault=lambda handler: False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(_http, "time", SimpleNamespace(sleep=lambda seconds: None))
    monkeypatch.setenv("HF_TOKEN", "hf_mine")
    with served(found, HubHandler) as url:
        monkeypatch.setattr(constants, "ENDPOINT", url)
        yield found


@pytest.fixture
def push(run, pair, tmp_path):
    """Runs infer.convert, which writes the folder `new`."""
    flags = ["--target", pair / "target", "--draft", pair / "draft", "--target-layer-inference", 0]
    flags += ["--output", tmp_path / "new", "--overwrite", "--push", "me/mine", "--private"]
    return lambda *more: run("infer.convert", *flags, *more)


def test_a_drafter_is_pushed_with_its_card_in_one_commit(hub, push, tmp_path):
    new, others = tmp_path / "new", {"training_run.json", "notes.json"}
    stored = ("model", "earlier", "a/b")
    hub.info["siblings"] = [{"rfilename": f"{name}.safetensors"} for name in stored]
    done = push("--license", "mit", "--base-model", "owner/target", "--to", "authors")
    assert done.out.endswith("/me/mine\n") and done.err == ""
    ((_, *changes),) = hub.commits
    kept = {each["value"]["path"]: each for each in changes}
    assert kept.pop("earlier.safetensors")["key"] == "deletedFile"
    assert kept.keys() == NAMES.keys()
    assert kept["model.safetensors"]["value"]["oid"] == file_hash(new / "model.safetensors")
    card = metadata_load(new / "README.md")
    assert (card["license"], card["base_model"]) == ("mit", "owner/target")
    assert "--draft me/mine --target-layer-inference 0 --pro" in (new / "README.md").read_text()
    for name in ("README.md", *others):
        (new / name).write_text("{}")
    assert push().code == 0 and (new / "README.md").read_text() == "{}"
    assert not others & {each["value"].get("path") for each in hub.commits[1]}
    hub.info["tags"] = ["other"]
    assert "holds a model without the tag moa-jax" in push().refusal() and len(hub.commits) == 2
    hub.info["private"] = False
    assert "the repository is public; change that" in push().refusal()


@pytest.mark.parametrize(
    "at, fault, code, says",
    [
        ("", 401, 2, "run `hf auth login`, or set HF_TOKEN"),
        ("/commit/", 403, 2, "the token may not write there (403)"),
        ("", 404, 2, "no such owner or repository (404)"),
        ("/preupload/", 429, 75, "429"),
        ("/commit/", 503, 75, "503"),
        ("/objects/batch", None, 75, "disconnected"),
        ("no token", None, 2, "no token of the hub; run `hf auth login`"),
    ],
)
def test_a_push_that_fails_is_one_line(hub, push, monkeypatch, tmp_path, at, fault, code, says):
    reply = lambda to: to.reply(fault, {"error": "no"}) if fault else to.cut()
    hub.fault = lambda handler: at in handler.path and reply(handler)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    if at == "no token":
        monkeypatch.delenv("HF_TOKEN")
    line = (done := push()).refusal(code)
    assert line.startswith("infer.convert: --push me/mine: ") and says in line, line
    assert done.err.count("\n") == 1 and done.out == "" and hub.commits == []
    assert (tmp_path / "new").exists() == (at != "no token")


def test_a_card_states_what_the_run_recorded(pair, tmp_path):
    records = '{"source": "star", "license": "MIT"}\n' * 2 + '{"text": "of no source"}\n'
    (tmp_path / "chat.jsonl").write_text(records)
    paths = (str(tmp_path / "chat.jsonl"), "gone.jsonl", "hub:owner/set@1a2b/train")
    config = changed(distill_config(tmp_path, pair / "target"), data_train=paths)
    (tmp_path / "run").mkdir()
    measured = '{"step": 4, "kind": "eval", "agreement": [0.5, 0.25], "simulated_tau": 1.625}\n'
    (tmp_path / "run" / "metrics.jsonl").write_text(measured)
    card = card_of(config, 4, "me/mine", "python -m train.distill --config x.py")
    assert (card.datasets, card.method, card.target) == (("owner/set",), "moa", "target")
    for lines in (
        "updates of this command:\n\n    python -m train.distill --config x.py\n",
        "| star | 2 | MIT |\n| chat.jsonl | 1 | unknown |\n| gone.jsonl | unknown | unknown: ",
        " | 0.500 | 0.250 |\n| simulated tau of a chain up to here | 1.500 | 1.625 |\n",
    ):
        assert lines in card.training
    assert "measured no tau" in card_of(config, 8, "me/mine", "").training
