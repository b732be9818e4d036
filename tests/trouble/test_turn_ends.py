"""The end of a turn: stated in no config, by ids that cannot be, or by the template alone."""

import json

import pytest

from moa_jax.pretrained import describe_target

ADDED = ("<|eos|>", "<|im_end|>")
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' ~ m['role'] ~ '\n' ~ m['content'] ~ '<|im_end|>\n' }}"
    "{% endfor %}"
)
REFUSING = "{{ raise_exception('no') }}"
PROMPT = ("--prompt-ids", "5,17,3", "--mode", "plain", "--max-new-tokens", "12", "--json")


@pytest.fixture
def target(pair):
    """A random target without any end in its configs, and with words as tokens."""
    for name in ("config.json", "generation_config.json"):
        if (path := pair / "target" / name).is_file():
            path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": None}))
    return pair / "target"


def answer(run, target):
    """The answer's ids, why it ended, and stderr."""
    done = run("infer.generate", "--target", target, *PROMPT)
    assert done.code == 0, done.err
    (found,) = json.loads(done.out)["results"]
    return found["token_ids"], found["finish_reason"], done.err


def name_ends(target, ids, **settings):
    """Give the tokens of ADDED these ids, and the tokenizer these settings."""
    vocab = {f"w{index}": index for index in range(101)}
    ends = dict(zip(ADDED, ids, strict=False))
    kept = {token: index for token, index in vocab.items() if index not in ends.values()}
    content = {
        "version": "1.0",
        "model": {"type": "WordLevel", "unk_token": "w0", "vocab": kept | ends},
        "added_tokens": [
            dict(id=index, content=token, special=True, single_word=False)
            | dict(lstrip=False, rstrip=False, normalized=False)
            for token, index in ends.items()
        ],
    }
    (target / "tokenizer.json").write_text(json.dumps(content))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **settings}
    (target / "tokenizer_config.json").write_text(json.dumps(settings))


def state(target, **config):
    path = target / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))


def test_the_tokenizer_ends_answers(run, target):
    """Its eos token, the end that its template writes, and a token that no file names."""
    ids, reason, _ = answer(run, target)
    assert reason == "length"
    place = next(i for i, token in enumerate(ids) if i and token not in ids[:i])
    end, other = ids[place], next(i for i in range(101) if i not in ids)
    for ends, settings in (
        ((end, other), {"eos_token": "<|eos|>"}),
        ((end, other), {"eos_token": {"__type": "AddedToken", "content": "<|eos|>"}}),
        ((other, end), {"chat_template": CHATML}),
        ((other, end), {"chat_template": [{"name": "default", "template": CHATML}]}),
    ):
        name_ends(target, ends, **settings)
        assert end in describe_target(target).generation.eos_ids, settings
    assert answer(run, target)[:2] == (ids[: place + 1], "stop")
    name_ends(target, (other, end), eos_token="<|eos|>", chat_template=REFUSING)
    assert end not in describe_target(target).generation.eos_ids
    (target / "chat_template.jinja").write_text(CHATML)
    assert end in describe_target(target).generation.eos_ids


def test_an_end_that_cannot_be_written_is_named(run, target):
    ids, _, _ = answer(run, target)
    name_ends(target, (ids[0], 100), eos_token="<|eos|>")
    for stated in (-1, 101, [5000]):
        state(target, eos_token_id=stated)
        found, reason, err = answer(run, target)
        assert (found, reason) == (ids[:1], "stop")
        (line,) = [line for line in err.splitlines() if "end ids" in line]
        value = stated[0] if isinstance(stated, list) else stated
        assert f"outside the vocabulary of 101 and end no answer: {value} (config.json)" in line


def test_a_template_that_is_not_one_is_refused(run, target):
    name_ends(target, (7, 9), chat_template=["x"])
    line = run("infer.generate", "--target", target, *PROMPT).refusal()
    assert "cannot load the tokenizer" in line


def test_converted_targets_state_all_ends(run, target, tmp_path):
    name_ends(target, (7, 9), eos_token="<|eos|>", chat_template=CHATML)
    state(target, eos_token_id=-1)
    assert run("infer.convert", "--target", target, "--output", tmp_path / "new").code == 0
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / "new" / name).read_text())["eos_token_id"] == [7, 9]
