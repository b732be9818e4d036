"""`infer.generate` as programs and people call it."""

import io
import json
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from infer import generate
from infer.cli import run
from moa_jax import Session, load_target
from moa_jax.tokenizer import train_tokenizer
from tests.conftest import golden_cases
from tests.model_folders import save_random_pair

RESULT_KEYS = {
    *("prompt_ids", "token_ids", "text", "finish_reason", "rounds", "accept_lengths", "tau"),
    *("prefill_s", "decode_s", "tokens_per_s"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[str]:
    """The flags that name a random pair, whose target has 300 tokens and a tokenizer."""
    folder = tmp_path_factory.mktemp("pair")
    save_random_pair(folder, "llama", seed=5, vocab_size=300)
    train_tokenizer(iter(["Good morning, how can I help?"] * 9), 290, folder / "tokenizer")
    for file in (folder / "tokenizer").iterdir():
        file.rename(folder / "target" / file.name)
    return ["--target", str(folder / "target"), "--draft", str(folder / "draft")]


@pytest.fixture
def ask(folders, capsys):
    """Runs the program; gives its exit code, stdout and stderr."""

    def ask(*flags: str, models: list[str] = folders) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as end:
            run(generate.main, [*models, *flags])
        out, err = capsys.readouterr()
        return end.value.code, out, err

    return ask


def test_json_is_the_contract(ask, folders):
    code, out, _ = ask("--prompt-ids", "5,6,7", "--max-new-tokens", "9", "--json")
    document = json.loads(out)
    (result,) = document["results"]
    assert code == 0 and out.count("\n") == 1 and set(result) == RESULT_KEYS
    assert 1 + sum(result["accept_lengths"]) == len(result["token_ids"])
    assert result["rounds"] == len(result["accept_lengths"])
    target = load_target(folders[1], jnp.float32)
    (plain,) = Session(target).generate([[5, 6, 7]], 9)
    assert result["token_ids"] == plain.token_ids
    assert document["settings"]["mode"] == "chain" and document["settings"]["depth"] == 5


@pytest.mark.parametrize("folder", golden_cases("moa_llama_trained", "generate.npz"))
def test_json_equals_recorded_draft(folder, ask):
    arrays = np.load(folder / "generate.npz")
    prompt, whole = (arrays[f"p0/{name}"].reshape(-1).tolist() for name in ("prompt", "vanilla"))
    models = ["--target", str(folder / "target"), "--draft", str(folder / "draft")]
    flags = ["--mode", "chain", "--json", "--max-new-tokens", str(len(whole) - len(prompt))]
    _, out, _ = ask("--prompt-ids", ",".join(map(str, prompt)), *flags, models=models)
    assert prompt + json.loads(out)["results"][0]["token_ids"] == whole


def test_text_streams_and_compares(ask):
    code, out, err = ask("--prompt", "Good morning", "--max-new-tokens", "8", "--compare")
    assert code == 0 and out.endswith("\n")
    assert "tau" in err and "the same tokens" in err and "tokens/s" in err


def test_prompts_from_a_file(ask, tmp_path):
    file = tmp_path / "prompts.jsonl"
    lines = [
        {"prompt": "Good morning"},
        {"messages": [{"role": "user", "content": "Good morning"}]},
        {"prompt_ids": [5, 6]},
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    _, out, _ = ask("--prompts", str(file), "--json", "--max-new-tokens", "4")
    first, second, third = json.loads(out)["results"]
    assert first["prompt_ids"] == second["prompt_ids"] and third["prompt_ids"] == [5, 6]
    assert first["token_ids"] == second["token_ids"]


def test_prompt_from_stdin(ask, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Good morning"))
    _, out, _ = ask("--json", "--max-new-tokens", "4")
    assert len(json.loads(out)["results"]) == 1


def test_chat_keeps_its_history(ask, monkeypatch):
    asked = iter(["Good morning", "help", "/new", "Good morning", ""])
    prompts = []
    answer = generate._answer_as_text

    def spy(session, prompt, *rest):
        prompts.append(prompt)
        return answer(session, prompt, *rest)

    monkeypatch.setattr(generate, "_answer_as_text", spy)
    monkeypatch.setattr(generate, "_ask", lambda: next(asked))
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    ask("--max-new-tokens", "4")
    assert prompts[1][: len(prompts[0])] == prompts[0] and prompts[2] == prompts[0]


def test_vllm_speculative_config(ask, folders):
    config = {"method": "moa", "model": folders[3], "num_speculative_tokens": 2}
    flags = ["--prompt-ids", "5,6", "--json", "--max-new-tokens", "4"]
    _, out, _ = ask("--speculative-config", json.dumps(config), *flags, models=folders[:2])
    assert json.loads(out)["settings"]["depth"] == 3


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (["--prompt-ids", "1,x"], "write whole numbers with commas"),
        (["--prompt-ids", "300"], "outside the vocabulary of 300"),
        (["--prompt-ids", ""], "prompt 0 is empty"),
        (["--prompt", "  "], "prompt is empty"),
        (["--prompt-ids", "5", "--max-new-tokens", "500"], "256 positions"),
        (["--prompt-ids", "5", "--max-new-tokens", "0"], "at least 1"),
        (["--prompt-ids", "5", "--depth", "0"], "'0' is not a whole number"),
        (["--prompt-ids", "5", "--temperature", "0.8"], "only 0 so far"),
        (["--prompt-ids", "5", "--json", "--compare"], "--compare goes with"),
        (["--prompt-ids", "5", "--speculate"], "unrecognized arguments: --speculate"),
        (["--prompt-ids", "5", "--speculative-config", "{"], "not JSON"),
        (["--prompt-ids", "5", "--speculative-config", '{"draft_k": 3}'], "draft_k has no meaning"),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
    ],
)
def test_bad_flags_are_one_line_and_exit_2(ask, flags, line):
    code, out, err = ask(*flags)
    notices, last = err.strip().split("\n")[:-1], err.strip().split("\n")[-1]
    assert code == 2 and out == "" and line in last, err
    assert all("target_layer_inference" in notice for notice in notices)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ('{"prompt_ids": [5]}\n{"prompt_ids": [5}\n', "line 2 is not JSON"),
        ('{"prompt_ids": "5"}\n', "line 1: `prompt_ids` is not a list"),
        ('{"text": "hello"}\n', "line 1: give it `prompt`"),
        ("[1]\n", "line 1 is not a JSON object"),
        ("\n", "holds no prompts"),
    ],
)
def test_bad_prompt_files_name_the_line(ask, tmp_path, content, line):
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    code, _, err = ask("--prompts", str(file), "--json")
    assert code == 2 and line in err.strip().split("\n")[-1]


def test_runs_as_a_module():
    """`python -m infer.generate` with a wrong folder: one line on stderr, exit 2."""
    command = [sys.executable, "-m", "infer.generate", "--target", "no-such-folder"]
    command += ["--mode", "plain", "--prompt-ids", "1"]
    environment = {"HF_HUB_OFFLINE": "1", "JAX_PLATFORMS": "cpu", "PATH": ""}
    found = subprocess.run(
        command, capture_output=True, text=True, env=environment, cwd=Path(__file__).parents[1]
    )
    assert found.returncode == 2 and found.stdout == ""
    assert found.stderr.count("\n") == 1 and "no-such-folder" in found.stderr
