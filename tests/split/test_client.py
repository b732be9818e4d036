"""The program infer.client: what it refuses with one line, what it prints, and its exit codes."""

from __future__ import annotations

import dataclasses
import json
import socket
import ssl
from types import SimpleNamespace

import pytest

from infer import client
from infer.bench.network import in_thread
from infer.cli import program
from infer.split_client.state import AnswerEvent
from moa_jax.config import Sampling
from moa_jax.decode.detokenize import Detokenizer, Writer
from moa_jax.decode.session import rows_of
from moa_jax.split import protocol
from moa_jax.split.client_drafter import ClientDrafter
from tests.certificates import certificate
from tests.model_folders import save_random_pair
from tests.pairs import NO_STOP, Pair, random_pair_of
from tests.split.resets import ResettingProxy
from tests.split.split_client import CHAIN, relayed, run_client, server_at, serving
from tests.split.split_client import PROMPT as TOY_PROMPT
from tests.split.split_server import ToySlots, plain, running

PROMPT, NEW = [5, 9, 4, 17, 23], 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("pair")


@pytest.fixture(scope="module")
def pair(folder) -> Pair:
    return random_pair_of("llama", 1, folder)


@pytest.fixture(scope="module")
def server(slots, facts, pair):
    with serving(slots, facts, pair.target.config.vocab_size, token="secret") as found:
        yield found


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Files that flags name, by name."""
    folder = tmp_path_factory.mktemp("files")
    texts = {
        "token": "secret\n",
        "wrong": "other\n",
        "bad.jsonl": '{"prompt_ids": [1, "x"]}\n',
        "broken.jsonl": '{"prompt_ids": [1\n',
        "blank.jsonl": '{"prompt_ids": []}\n',
        "two.jsonl": '{"prompt_ids": [5, 9, 4, 17, 23]}\n{"prompt_ids": [7]}\n',
    }
    for name, text in texts.items():
        (folder / name).write_text(text)
    return {name.partition(".")[0]: str(folder / name) for name in texts}


@pytest.fixture
def ask(folder, server, files, capsys, monkeypatch):
    """Runs the program; its exit code and what it printed. It compiles what it needs alone."""
    monkeypatch.setattr(ClientDrafter, "warm", lambda self, counts, shapes: None)

    def run(*flags: object, port=None, url=None, draft=None) -> tuple[int, str, str]:
        url = url or f"ws://127.0.0.1:{port or server.port}/v1/split"
        where = [] if "--offline" in flags else ["--connect", url]
        if where and "--token-file" not in flags:
            where += ["--token-file", files["token"]]
        models = ["--target", folder / "target", "--draft", draft or folder / "draft"]
        models += ["--dtype", "float32", "--target-layer-inference", 1, "--timeout", 30]
        models += ["--lengths", "2"] if "--mode" not in flags else []
        given = [*where, *models, "--max-new-tokens", NEW, *flags]
        with pytest.raises(SystemExit) as exit:
            program.run(client.main, list(map(str, given)))
        shown = capsys.readouterr()
        return exit.value.code, shown.out, shown.err

    return run


IDS = ["--prompt-ids", ",".join(map(str, PROMPT)), "--stop-ids", ""]


def refused(found: tuple[int, str, str]) -> str:
    """The one line with which the program ended."""
    code, out, err = found
    assert (code, out) == (2, "") and err.count("\n") == 1, found
    return err


PROMPTS = {
    "": "there is no prompt",
    "--prompt-ids 5,1000": "outside the vocabulary",
    "--prompts {blank}": "prompt 0 is empty",
    "--prompts {bad}": "not a list of whole numbers",
    "--prompts {broken}": "broken.jsonl",
    "--prompt Hello": "no tokenizer.json",
    "--prompt-ids 5 --max-new-tokens 100000": "positions",
    "--prompt-ids 5 --stop x": "--stop needs text",
    "--prompt-ids 5 --stop-ids 5000": "outside the target's vocabulary",
    "--prompt-ids 5 --offline --mode stream": "leave out --offline",
}


@pytest.mark.parametrize("line", PROMPTS)
def test_split_client_refuses_prompts_with_one_line(line, ask, files, monkeypatch):
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    assert PROMPTS[line] in refused(ask(*line.format(**files).split()))


def test_split_client_says_what_a_server_refuses(ask, server, files):
    """Each in one line, and the server goes on."""
    assert "rejects this token" in refused(ask(*IDS, "--token-file", files["wrong"]))
    wrong = f"ws://127.0.0.1:{server.port}/v2"
    assert "nothing answers there" in refused(ask(*IDS, url=wrong))
    said = refused(ask("--prompt-ids", ",".join(map(str, range(3, 43)))))
    assert "prompt 0 has 40 tokens, but the server reads 32 at most" in said
    said = refused(ask("--prompt-ids", "5", "--max-new-tokens", 80))
    assert "1 tokens and 80 are to follow, but the server holds 64 at most" in said
    assert server.get("/health").status_code == 200


def test_split_client_prints_the_answers_before_one_that_fails(ask, server, files):
    """The second prompt is refused: what is there of --json is printed nevertheless."""
    fault = protocol.encode(protocol.Fault("too_long", "not this one", False))

    def spoil(message, seen):
        opened = sum(one[1] == 66 for one in seen)
        return [fault] if message[1] == 66 and opened > 1 else [message]

    with relayed(server.port, spoil, token="secret") as port:
        flags = ["--prompts", files["two"], "--stop-ids", "", "--json", "--mode", "stream"]
        code, out, err = ask(*flags, port=port)
    assert code == 2 and err.count("\n") == 1 and "not this one" in err
    assert len(json.loads(out)["results"]) == 1


def test_split_client_says_where_no_server_is(ask):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    said = refused(ask(*IDS, port=port))
    assert f"127.0.0.1:{port}/v1/split: " in said
    assert "start infer.server there, or give --offline" in said
    said = refused(ask(*IDS, url="ws://nowhere.invalid:1/v1/split"))
    assert "start infer.server there, or give --offline" in said
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it takes connections, no more
        url = f"ws://127.0.0.1:{silent.getsockname()[1]}/v1/split"
        assert "no answer in time" in refused(ask(*IDS, "--timeout", 0.2, url=url))
        secure = url.replace("ws:", "wss:")
        assert "--offline" in refused(ask(*IDS, "--timeout", 0.2, url=secure))


def test_split_client_of_another_version_is_told_so(ask, server):
    spoil = lambda message, seen: [bytes((9,)) + message[1:]]
    with relayed(server.port, spoil, token="secret") as port:
        said = refused(ask(*IDS, port=port))
    assert "speaks protocol version 9" in said
    refusal = protocol.encode(
        protocol.Fault("version", "the other side speaks protocol version 1", True)
    )
    with relayed(server.port, lambda message, seen: [refusal], token="secret") as port:
        said = refused(ask(*IDS, port=port))
    assert "the server refuses: the other side speaks protocol version 1" in said


def test_split_client_with_another_drafter_is_told_so(ask, capsys, tmp_path):
    """The same sizes, other weights; another N."""
    save_random_pair(tmp_path, "llama", seed=77, num_reused=1, num_hidden_layers=3)
    capsys.readouterr()
    said = refused(ask(*IDS, draft=tmp_path / "draft"))
    assert "not the same pair: the drafter's files" in said
    assert "N (target layers that the drafter reuses)" in refused(
        ask(*IDS, "--target-layer-inference", 0)
    )


def test_split_client_of_a_server_with_no_room_is_not_told_to_start_one(ask, server, monkeypatch):
    limits = dataclasses.replace(server.server.limits, max_clients=0)
    monkeypatch.setattr(server.server, "limits", limits)
    said = refused(ask(*IDS))
    assert "try again later; give --offline" in said and "start infer.server" not in said


FIELDS = set(
    "prompt_ids token_ids finish_reason rounds accept_lengths tau prefill_s decode_s tokens_per_s"
    " server_calls server_calls_per_token reply_ms rtt_ms bytes_up bytes_down bytes_up_per_token"
    " bytes_down_per_token drafted rounds_drafted_ahead drafting_s waiting_s alone_s drops"
    " unverified rewritten text".split()
)


@pytest.mark.parametrize(
    "mode",
    ["plain", "stream", *(pytest.param(m, marks=pytest.mark.slow) for m in ("chain", "tree"))],
)
def test_split_client_json_is_the_targets_answer_with_figures(mode, ask, pair, files):
    flags = ["--depth", 4, "--breadth", 2, "--total-tokens", 6] if mode == "tree" else []
    code, out, err = ask(
        "--prompts", files["two"], "--stop-ids", "", "--json", "--mode", mode, *flags
    )
    assert code == 0 and out.count("\n") == 1, err
    found = json.loads(out)
    assert found.keys() == {"results", "settings", "traffic"}
    assert found["settings"]["mode"] == mode and not found["settings"]["offline"]
    assert found["traffic"]["bytes_up"] > 0 and found["traffic"]["bytes_down"] > 0
    for result, prompt in zip(found["results"], (PROMPT, [7]), strict=True):
        (plain,) = pair.plain.generate([prompt], NEW, NO_STOP)
        assert (result["prompt_ids"], result["token_ids"]) == (prompt, plain.token_ids)
        assert result["finish_reason"] == "length" and result["unverified"] == 0
        assert result.keys() == FIELDS and result["text"] is None
        empty = {name for name in FIELDS - {"text"} if result[name] is None}
        assert empty == ({"tau", "reply_ms"} if mode == "stream" else set())
        assert sum(result["accept_lengths"]) == (0 if mode == "stream" else NEW - 1)
        assert result["bytes_down"] > result["bytes_up"] > 0
        assert result["bytes_down_per_token"] == result["bytes_down"] / NEW
    for way in ("bytes_up", "bytes_down"):  # all of it, but what said Hello and Welcome
        rest = found["traffic"][way] - sum(result[way] for result in found["results"])
        assert 0 < rest < 1000


@pytest.mark.slow
def test_split_client_samples_what_one_process_samples(ask, pair, files):
    law = Sampling(0.8, top_k=20, seed=3)
    code, out, err = ask(
        "--prompts", files["two"], "--stop-ids", "", "--json", "--seed", 3, "--top-k", 20,
        "--temperature", 0.8, "--codec", "int8", "--compress",
    )  # fmt: skip
    assert code == 0, err
    plain = pair.plain.generate([PROMPT, [7]], NEW, NO_STOP, rows_of(law, 2))
    found = [result["token_ids"] for result in json.loads(out)["results"]]
    assert found == [result.token_ids for result in plain]


def test_split_client_text_is_all_tokens_and_a_line(ask, pair):
    code, out, err = ask(*IDS)
    (plain,) = pair.plain.generate([PROMPT], NEW, NO_STOP)
    assert code == 0 and out.split() == list(map(str, plain.token_ids))
    assert err.count("\n") == 1 and err.startswith(f"[{NEW} tokens, ")


class Letters:
    """A tokenizer whose tokens are ASCII."""

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return bytes(tokens).decode()


FIGURES = {"server_calls": 2, "tau": None, "tokens_per_s": None, "reply_ms": None}
FIGURES |= dict.fromkeys(("bytes_down", "unverified", "rewritten", "drops"), 0)


@pytest.mark.parametrize(
    "rest, shown",
    [
        (b"k you!", ["Hi. ", "", "\n"]),
        (b"s", ["Hi. ", "Thans", "\n"]),
        (b"", ["Hi. ", "", "Than\n"]),
    ],
)
def test_split_client_shows_nothing_of_a_stop_text_that_may_be_completed(rest, shown, capsys):
    output, text, found = client._Output(Writer(Letters()), ["Thank you"]), b"Hi. Than", []
    answering = SimpleNamespace(text=SimpleNamespace(answer=list(text + rest)))
    output.start()
    for verified in (len(text), len(text + rest)):
        output.take(AnswerEvent(verified), answering)
        found.append(capsys.readouterr().out)
    output.end(FIGURES | {"token_ids": answering.text.answer})
    assert [*found, capsys.readouterr().out] == shown


@pytest.mark.parametrize("stops", [[], ["never there"]])
@pytest.mark.parametrize("kind", ["json", "text"])
def test_split_client_decodes_each_token_of_a_long_answer_once(kind, stops, monkeypatch, capsys):
    sizes, growing, new = [], Detokenizer.growing, 300

    def counted(self: Detokenizer, tokens: list[int]) -> tuple[str, int]:
        sizes.append(len(tokens))
        return growing(self, tokens)

    monkeypatch.setattr(Detokenizer, "growing", counted)
    writer = Writer(Letters())
    args = SimpleNamespace(max_new_tokens=new, stop=stops)
    job = client.ClientJob(args, [TOY_PROMPT], [], Sampling())
    found = []
    document = SimpleNamespace(rest={}, add=found.append)
    show = client._Output(writer, stops, document if kind == "json" else None)

    async def work(answering):
        show.start()
        show.end(await client._answer(answering, job, 0, TOY_PROMPT, show))

    with running(ToySlots(1)) as server:
        run_client(server_at(server.port), CHAIN, work)
    text = bytes(plain(TOY_PROMPT, new)).decode()
    assert (found[0]["text"] if found else capsys.readouterr().out.removesuffix("\n")) == text
    assert max(sizes) < 50 and len(sizes) < 1.5 * new


@pytest.mark.slow
def test_split_client_offline_is_the_drafter_alone(ask):
    code, out, err = ask("--offline", *IDS, "--json")
    assert code == 0, err
    (result,) = json.loads(out)["results"]
    assert (len(result["token_ids"]), result["unverified"]) == (NEW, NEW)
    assert result["server_calls"] == result["drops"] == 0 and result["tau"] is None
    code, out, err = ask("--offline", *IDS)
    assert out.split() == list(map(str, result["token_ids"])) and "12 unverified" in err


def test_split_client_needs_no_file_of_the_targets_but_what_it_borrows(ask, folder, tmp_path):
    """A lookup drafter has no weights, and cannot be split: it drafts whole chains."""
    said = refused(ask(*IDS, draft="lookup"))
    assert "--mode chain: this drafter cannot write token by token" in said
    said = refused(ask(*IDS, "--offline", "--mode", "tree", draft="lookup"))
    assert "--offline: this drafter cannot write token by token" in said


@pytest.mark.parametrize("policy", ["verify", "keep"])
def test_disconnect_program_says_it_and_exits_with_0(policy, ask, server, pair, monkeypatch):
    """The link is cut after the first bytes of the answer, and comes back."""
    monkeypatch.setattr("infer.split_client.session.FIRST_WAIT", 0.01)
    with in_thread(ResettingProxy("127.0.0.1", server.port)) as proxy:
        proxy.reset_after(6000, "down")
        url = f"ws://127.0.0.1:{proxy.port}/v1/split"
        code, out, err = ask(*IDS, "--json", "--policy", policy, "--max-new-tokens", 30, url=url)
    assert code == 0 and "[link lost: " in err, err
    (result,) = json.loads(out)["results"]
    assert len(result["token_ids"]) == 30 and result["drops"]
    if policy == "verify":
        (plain,) = pair.plain.generate([PROMPT], 30, NO_STOP)
        assert result["token_ids"] == plain.token_ids and "[connected again]" in err


@pytest.mark.slow
def test_split_client_knows_certificates(ask, server, tmp_path):
    """A certificate that nobody signed, the right one, and a server that speaks no TLS."""
    cert, key = certificate(tmp_path)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(cert, key)
    with relayed(server.port, lambda message, seen: [message], token="secret", tls=tls) as port:
        url = f"wss://127.0.0.1:{port}/v1/split"
        said = refused(ask(*IDS, url=url))
        assert "its certificate is not trusted (" in said and "see --tls-ca" in said
        code, out, err = ask(*IDS, "--tls-ca", cert, url=url)
        assert code == 0 and len(out.split()) == NEW, err
        said = refused(ask(*IDS, port=port))
        assert "--offline" in said
