"""`infer.generate` as programs and users call it."""

import json
import sys

import jax
import jax.numpy as jnp
import pytest

from infer import generate
from moa_jax import Session, load_target
from moa_jax.config import Sampling
from moa_jax.data.tokenizer import train_tokenizer
from moa_jax.decode import step
from tests.model_folders import save_random_pair

RESULT_KEYS = {
    *("prompt_ids", "token_ids", "text", "finish_reason", "rounds", "accept_lengths", "tau"),
    *("prefill_s", "decode_s", "tokens_per_s", "drafted", "drafted_levels"),
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
    code, out, _ = ask("--prompt-ids", "5,6,7", "--max-new-tokens", "9", "--json")
    document = json.loads(out)
    (result,) = document["results"]
    assert code == 0 and out.count("\n") == 1 and set(result) == RESULT_KEYS
    assert 1 + sum(result["accept_lengths"]) == len(result["token_ids"])
    assert result["rounds"] == len(result["accept_lengths"])
    target = load_target(folders[1], jnp.float32)
    (plain,) = Session(target).generate([[5, 6, 7]], 9)
    assert result["token_ids"] == plain.token_ids
    assert document["settings"]["mode"] == "auto" and document["settings"]["depth"] == 5
    assert set(result["drafted"]) == {4} and len(result["drafted"]) == result["rounds"]


@pytest.mark.slow
def test_json_has_penalties_and_log_probabilities(ask, folders):
    flags = "--prompt-ids 5,6,7 --max-new-tokens 9 --mode chain --depth 3 --json --logprobs 2"
    code, out, _ = ask(*flags.split(), "--presence-penalty", "-0.5", "--frequency-penalty=1.5")
    document = json.loads(out)
    (result,) = document["results"]
    assert code == 0 and set(result) == RESULT_KEYS | {"logprobs"}
    row = Sampling(presence_penalty=-0.5, frequency_penalty=1.5)
    session = Session(load_target(folders[1], jnp.float32), top_logprobs=2)
    (plain,) = session.generate([[5, 6, 7]], 9, sampling=row)
    assert result["token_ids"] == plain.token_ids
    for ours, theirs in zip(result["logprobs"], plain.logprobs, strict=True):
        assert ours["logprob"] == pytest.approx(theirs.logprob, abs=1e-5)
        assert [token for token, _ in ours["top"]] == [token for token, _ in theirs.top]
    assert document["settings"]["presence_penalty"] == -0.5


@pytest.mark.slow
def test_text_streams_and_compares(ask, monkeypatch):
    monkeypatch.setattr("infer.bench.compare.SECONDS", 0.0)
    flags = ["--max-new-tokens", "8", "--mode", "chain", "--compare"]
    code, out, err = ask("--prompt", "Good morning", *flags)
    assert code == 0 and out.endswith("\n")
    assert "| chain |" in err and "chain writes the same tokens" in err and "once each" in err


@pytest.mark.slow
def test_check_reports_a_wrong_token_and_its_margin(ask, monkeypatch):
    """After six tokens, rounds with drafts take the second most likely token."""
    choose = step.choose

    def second(setup, batch_sampling, round_state, tree, logits_BNV):
        choice_BN = choose(setup, batch_sampling, round_state, tree, logits_BNV)
        second_BN = jax.lax.top_k(logits_BNV, 2)[1][..., 1]
        is_wrong_B1 = (tree.tokens_BN.shape[1] > 1) & (round_state.length_B[:, None] > 6)
        return jnp.where(is_wrong_B1, second_BN, choice_BN)

    flags = "--prompt-ids 5,6,7 --max-new-tokens 12 --mode chain --check".split()
    code, _, err = ask(*flags)
    assert code == 0 and "check: the same tokens as plain decoding" in err
    monkeypatch.setattr(step, "choose", second)
    code, _, err = ask(*flags)
    assert code == generate.DIFFERENT == 1 and "; the target prefers plain's by" in err
    code, out, _ = ask(*flags, "--json")
    difference = json.loads(out)["results"][0]["difference"]
    assert code == 1 and difference["index"] >= 4 and difference["margin"] > 0


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


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ('{"prompt_ids": [5]}\n{"prompt_ids": [5}\n', "line 2 is not JSON"),
        ('{"prompt_ids": [5]}\n{"prompt": 5}\n', "line 2: a record whose `prompt` is not text"),
        ('{"messages": [5]}\n', "line 1: a message that is not an object"),
        ("[1]\n", "line 1 is not a JSON object"),
        ("\n", "holds no prompts"),
    ],
)
def test_bad_prompt_files_name_the_line(ask, tmp_path, content, line):
    file = tmp_path / "prompts.jsonl"
    file.write_text(content)
    code, _, err = ask("--prompts", str(file), "--json")
    assert code == 2 and line in err.strip().split("\n")[-1]
