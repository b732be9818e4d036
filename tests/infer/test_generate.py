"""`infer.generate` as programs and users call it."""

import json
import sys

import jax.numpy as jnp
import pytest

from infer import generate
from moa_jax import Session, load_target
from moa_jax.config import Sampling
from moa_jax.data.tokenizer import train_tokenizer
from moa_jax.decode.exactness import Difference
from tests.model_folders import save_random_pair

RESULT_KEYS = {
    *("prompt_ids", "token_ids", "text", "finish_reason", "rounds", "accept_lengths", "tau"),
    *("prefill_s", "decode_s", "tokens_per_s", "drafted", "drafted_levels", "logprobs"),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> list[str]:
    """Returns the flags of a random pair; its target has 300 tokens and a tokenizer."""
    folder = tmp_path_factory.mktemp("pair")
    save_random_pair(folder, "llama", seed=5, vocab_size=300, num_hidden_layers=2)
    train_tokenizer(iter(["Good morning, how can I help?"] * 9), 290, folder / "tokenizer")
    for file in (folder / "tokenizer").iterdir():
        file.rename(folder / "target" / file.name)
    return ["--target", str(folder / "target"), "--draft", str(folder / "draft")]


@pytest.fixture
def ask(folders, run):
    """Runs the program; returns its exit code, stdout and stderr."""
    return lambda *flags: run("infer.generate", *folders, *flags)


def test_json_is_the_contract(ask, folders):
    flags = "--prompt-ids 5,6,7 --max-new-tokens 9 --json --logprobs 2 --presence-penalty -0.5"
    code, out, _ = ask(*flags.split(), "--frequency-penalty=1.5")
    document = json.loads(out)
    (result,) = document["results"]
    assert code == 0 and out.count("\n") == 1 and set(result) == RESULT_KEYS
    assert 1 + sum(result["accept_lengths"]) == len(result["token_ids"])
    assert result["rounds"] == len(result["accept_lengths"])
    row = Sampling(presence_penalty=-0.5, frequency_penalty=1.5)
    session = Session(load_target(folders[1], jnp.float32), top_logprobs=2)
    (plain,) = session.generate([[5, 6, 7]], 9, sampling=row)
    assert result["token_ids"] == plain.token_ids
    for ours, theirs in zip(result["logprobs"], plain.logprobs, strict=True):
        assert ours["logprob"] == pytest.approx(theirs.logprob, abs=1e-5)
        assert [token for token, _ in ours["top"]] == [token for token, _ in theirs.top]
    settings = {"mode": "auto", "depth": 5, "presence_penalty": -0.5}
    assert settings.items() <= document["settings"].items()
    assert set(result["drafted"]) == {4} and len(result["drafted"]) == result["rounds"]


@pytest.mark.slow
def test_text_streams_and_compares(ask, monkeypatch):
    monkeypatch.setattr("infer.bench.compare.SECONDS", 0.0)
    flags = ["--max-new-tokens", "8", "--mode", "chain", "--compare"]
    code, out, err = ask("--prompt", "Good morning", *flags)
    assert code == 0 and out.endswith("\n")
    assert "| chain |" in err and "chain writes the same tokens" in err and "once each" in err


@pytest.mark.slow
def test_check_reports_a_wrong_token_and_its_margin(ask, monkeypatch):
    flags = "--prompt-ids 5,6,7 --max-new-tokens 12 --mode chain --check".split()
    code, _, err = ask(*flags)
    assert code == 0 and "check: the same tokens as plain decoding" in err
    monkeypatch.setattr(generate, "compare", lambda *_: Difference(3, 5, 6, 0.01))
    code, _, err = ask(*flags)
    assert code == generate.DIFFERENT == 1 and "; the target prefers plain's by 0.01" in err
    code, out, _ = ask(*flags, "--json")
    found = json.loads(out)["results"][0]["difference"]
    assert code == 1 and found == {"index": 3, "plain": 5, "drafted": 6, "margin": 0.01}


@pytest.mark.slow
def test_stop_texts_end_answers_before_them(ask):
    """Streamed, whole and batched answers are cut alike; token ids keep the stop."""
    flags = ["--prompt", "Good morning", "--max-new-tokens", "24"]
    _, out, _ = ask(*flags, "--json")
    (whole,) = json.loads(out)["results"]
    text = whole["text"]
    stop = text[len(text) // 2 :][:3]
    cut = text[: text.index(stop)]
    _, out, _ = ask(*flags, "--json", "--stop", stop, "--stop", "never this")
    (found,) = json.loads(out)["results"]
    assert (found["text"], found["finish_reason"]) == (cut, "stop")
    assert found["token_ids"] == whole["token_ids"][: len(found["token_ids"])]
    assert 1 + sum(found["accept_lengths"]) == len(found["token_ids"])
    _, out, _ = ask(*flags, "--stop", stop)
    assert out == cut + "\n"


@pytest.fixture
def chat(ask, monkeypatch):
    """Sends lines to a chat; returns the prompts, and the number of programs after each answer."""

    def chat(*lines: str) -> tuple[list[list[int]], list[int]]:
        asked, prompts, compiled = iter([*lines, ""]), [], []
        answer = generate._answer_as_text

        def spy(ask, prompt, *rest):
            prompts.append(prompt)
            found = answer(ask, prompt, *rest)
            compiled.append(ask.session.num_compiled)
            return found

        monkeypatch.setattr(generate, "_answer_as_text", spy)
        monkeypatch.setattr(generate, "_ask", lambda: next(asked))
        monkeypatch.setattr(generate, "fill_meanwhile", lambda session: None)
        monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
        ask("--max-new-tokens", "4")
        return prompts, compiled

    return chat


@pytest.mark.slow
def test_a_chat_has_a_history_and_grows_without_compiling(chat):
    """Prompts have one or several chunks, and need more rows than a single prompt would get."""
    said = "Good morning, how can I help? " * 2
    prompts, compiled = chat(*[said] * 8, "/new", said)
    for earlier, later in zip(prompts[:7], prompts[1:8], strict=True):
        assert later[: len(earlier)] == earlier
    assert prompts[8] == prompts[0] and len(prompts[0]) < 64 and 128 < len(prompts[7])
    assert compiled == [2] * 9
