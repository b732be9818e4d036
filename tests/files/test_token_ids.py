"""Vocabularies are read from tokenizer files, and so are the ids that end an answer."""

from __future__ import annotations

import json

import pytest

from moa_jax.files.token_ids import read_token_ids
from moa_jax.files.turn_ends import TokenizerEnds, read_ends
from tests.model_folders import refusal


@pytest.fixture
def write(tmp_path):
    """Writes tokenizer.json with this vocabulary, and tokenizer_config.json."""

    def write(vocab, added=(), **settings):
        added = [{"content": token, "id": index} for token, index in dict(added).items()]
        content = {"model": {"vocab": vocab}, "added_tokens": added}
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        return tmp_path

    return write


# ---- vocabularies -------------------------------------------------------------------------


def test_one_vocabulary_in_several_files(write):
    whole = {"a": 0, "b": 1, "<end>": 2}
    late = {"2": {"content": "<end>"}, "1": {"content": "<taken>"}}
    for vocab, added, settings in (
        (whole, {}, {}),
        ({"a": 0, "b": 1}, {}, {"added_tokens_decoder": late}),
        ([["a", -1.5], ["b", -2.5]], {"<end>": 2}, {}),  # as Unigram has it
        (whole | {"[PAD3]": 3, "[PAD4]": 4}, {}, {}),  # as llama.cpp fills rows up
    ):
        assert read_token_ids(write(vocab, added, **settings)) == whole


def test_a_damaged_vocabulary_is_one_line(write):
    for vocab in ({"a": "0"}, 3, ["a"]):
        assert "does not map tokens to ids" in refusal(read_token_ids, write(vocab))
    assert read_token_ids(write({})) is None


# ---- ends ---------------------------------------------------------------------------------

ADDED = {"<s>": 10, "</s>": 11, "<|im_start|>": 12, "<|im_end|>": 13, "<|im_end|>s": 14}
ROLE = "{% for m in messages %}"
TEMPLATES = {
    "ChatML": (ROLE + "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}", 13),
    "Llama 2": (
        ROLE + "{% if m.role == 'user' %}{{ bos_token }}[INST] {{ m.content }} [/INST]"
        "{% else %} {{ m.content }} {{ eos_token }}{% endif %}{% endfor %}",
        11,
    ),
    "text": (ROLE + "### {{ m.role }}: {{ m.content }}\n\n{% endfor %}", None),
    "refusing": ("{{ raise_exception('no') }}", None),
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_end_that_a_template_writes(write, name):
    template, turn_id = TEMPLATES[name]
    named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<none>"}
    folder = write({"a": 0}, ADDED, chat_template=template, **named)
    assert read_ends(folder) == TokenizerEnds(11, turn_id, None)


def test_ends_in_other_files(write):
    template = TEMPLATES["ChatML"][0]
    folder = write({"a": 0}, ADDED, eos_token=None)
    assert read_ends(folder) == TokenizerEnds()
    (folder / "special_tokens_map.json").write_text('{"eos_token": {"content": "</s>"}}')
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert read_ends(folder) == TokenizerEnds(11, 13, None)
    (folder / "chat_template.jinja").write_text(template.replace("<|im_end|>", "</s>"))
    assert read_ends(folder).turn_id == 11
