"""Chat data is selected without duplicates and evaluation text, and packed as token ids."""

import json
import re
from collections import Counter

import pytest

from moa_jax import InputError
from moa_jax.config import DataConfig
from moa_jax.data import batches, sources
from moa_jax.data.tokenizer import load_tokenizer
from tests.train.test_regenerate import ANSWER, SYSTEM, read, write
from train import corpus

WORDS = [f"w{i}" for i in range(20)]
LONG, SHORT = " ".join(WORDS), "Name the tallest mountain, please"


def talk(*questions: str, source: str = "repo#one") -> dict:
    turns = [each for text in questions for each in ({"role": "user", "content": text}, ANSWER)]
    about = {"source": source, "license": "MIT", "id": 7, "tools": [{"name": "f"}]}
    return {"messages": [SYSTEM, *turns], **about}


def test_prompts_are_drawn_without_duplicates_and_evaluation_text(tmp_path, capsys):
    evaluation = write(tmp_path / "q.jsonl", {"turns": [LONG, SHORT, "Why?"], "reference": None})
    good = [talk(f"One {i}?", "Why?", "And then?") for i in range(9)]
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}
    good[0]["messages"][2:2] = [call, {"role": "tool", "content": "5"}]
    good[0]["tools"] = [{"name": "f"}]
    bad = [
        talk("Hi", f"So W3: {', '.join(WORDS[4:17]).upper()}!", "Go on"),  # 13 words in a row
        talk("name the TALLEST mountain please?"),
        talk("one, 3", "Why?", "And then?"),  # as in `good`
        {"messages": [ANSWER], "source": "repo#one"},
        talk("With answers") | {"answers": [{"token_ids": [1]}, {}]},
    ]
    other = [talk(f"Two {' '.join(WORDS[i : i + 12])}", source="two") for i in range(5)]
    records = write(tmp_path / "r.jsonl", *good, *bad, *other, talk("Three?", source="repo#three"))
    flags = ["--records", str(records), "--without", str(evaluation), "--turns", "2"]
    flags += ["--sources", "one,two=3", "--output"]
    for name in "ab":
        corpus.main([*flags, str(tmp_path / f"{name}.jsonl")])
    found, again = (read(tmp_path / f"{name}.jsonl") for name in "ab")
    assert found == again
    first = ["".join(re.findall(r"\w", each["messages"][1]["content"])).lower() for each in found]
    assert sorted(first)[:9] == [f"one{i}" for i in range(9)] and first != sorted(first)
    assert [len(each["messages"]) for each in found].count(3) == 8 and len(found) == 12
    (with_tools,) = (each for each in found if len(each["messages"]) == 5)
    assert with_tools["messages"][2] == call and with_tools["tools"] == good[0]["tools"]
    assert with_tools.keys() - {"tools"} == {"messages", "source", "license"}
    out, err = capsys.readouterr()
    assert "2 of 17 records left out: 13 words" in err and "without a user message" in err
    assert "| repo#one | MIT | 9 | 9 | 0 | 0 | 0 | 0 |" in out and "| two |" in out
    with pytest.raises(InputError, match="exists already"):
        corpus.main([*flags, str(tmp_path / "a.jsonl")])


def test_packed_ids_give_the_rows_of_the_answers(ask, scripted, folder, tmp_path, capsys):
    ask(tmp_path / "a.jsonl", "--max-new-tokens", "9")
    packed = tmp_path / "new" / "ids.jsonl.gz"
    corpus.main(["--records", str(tmp_path / "a.jsonl"), "--ids-only", "--output", str(packed)])
    rows = []
    for path in (tmp_path / "a.jsonl", packed):
        config = DataConfig((str(path),), (), 500, 500, rows_per_batch=4, seed=0, pack=False)
        source, _ = batches.load(config, load_tokenizer(folder), 320, "train")
        rows.append(Counter(map(bytes, source.rows.tokens_BT * 2 + source.rows.response_BT)))
    assert rows[0] == rows[1]
    records = list(sources.read(str(packed)))
    answers = [answer for record in records for answer in record["answers"]]
    cut = sum(answer["finish_reason"] == "length" for answer in answers)
    assert 0 < cut < len(answers) and "messages" not in json.dumps(records)
    assert f"| {len(records)} | " in capsys.readouterr().out
