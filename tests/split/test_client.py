"""The program infer.client: refusals of one line, its output, and its exit codes."""

from __future__ import annotations

import dataclasses
import json
import socket

import pytest

from infer.bench.network import in_thread
from moa_jax.split import protocol
from moa_jax.split.client_drafter import ClientDrafter
from tests.conftest import Done
from tests.meeting import free_port
from tests.pairs import NO_STOP
from tests.split.split_client import ResettingProxy, relayed, serving

PROMPT, NEW = [5, 9, 4, 17, 23], 12


@pytest.fixture(scope="module")
def server(slots, facts, pair):
    with serving(slots, facts, pair.target.config.vocab_size, token="secret") as found:
        yield found


@pytest.fixture
def ask(pair, server, run, tmp_path, monkeypatch):
    """Runs the program and returns its exit code and output; it compiles its programs alone."""
    monkeypatch.setattr(ClientDrafter, "warm", lambda self, counts, shapes: None)
    (tmp_path / "token").write_text("secret\n")

    def ask(*flags: object, port=None, url=None) -> Done:
        url = url or f"ws://127.0.0.1:{port or server.port}/v1/split"
        where = [] if "--offline" in flags else ["--connect", url]
        if where and "--token-file" not in flags:
            where += ["--token-file", tmp_path / "token"]
        models = ["--target", pair.target.folder, "--draft", pair.drafter.folder]
        models += ["--dtype", "float32", "--target-layer-inference", 1, "--timeout", 30]
        models += ["--lengths", "2"] if "--mode" not in flags else []
        return run("infer.client", *where, *models, "--max-new-tokens", NEW, *flags)

    return ask


IDS = ["--prompt-ids", ",".join(map(str, PROMPT)), "--stop-ids", ""]


def refused(found: Done, wanted: int = 2) -> str:
    """Returns the only line of the program's error, whose exit code is `wanted`."""
    code, out, err = found
    assert (code, out) == (wanted, "") and err.count("\n") == 1, found
    return err


REFUSED = {
    "": "there is no prompt",
    "--prompt-ids 5,1000": "outside the vocabulary",
    "--prompt-ids 5 --stop x": "--stop needs text",
    "--prompt-ids 5 --offline --mode stream": "leave out --offline",
    "--prompt-ids 5 --draft lookup": "--mode chain: this drafter cannot write token by token",
    "--prompt-ids 5 --token-file TMP/wrong": "rejects this token",
    "--prompt-ids 5 --max-new-tokens 80": "1 tokens and 80 are to follow, but the server holds 64",
    f"--prompt-ids 5{',5' * 39}": "prompt 0 has 40 tokens, but the server reads 32 at most",
    "--prompt-ids 5 --target-layer-inference 0": "N (target layers that the drafter reuses)",
}


@pytest.mark.parametrize("line", REFUSED)
def test_split_client_refuses_with_one_line(line, ask, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    (tmp_path / "wrong").write_text("other\n")
    assert REFUSED[line] in refused(ask(*line.replace("TMP", str(tmp_path)).split()))


def test_split_client_reports_a_missing_server(ask, server):
    wrong = f"ws://127.0.0.1:{server.port}/v2"
    assert "nothing answers there" in refused(ask(*IDS, url=wrong))
    said = refused(ask(*IDS, port=free_port()), 75)
    assert "start infer.server there, or give --offline" in said
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it only accepts connections
        url = f"ws://127.0.0.1:{silent.getsockname()[1]}/v1/split"
        assert "no answer in time" in refused(ask(*IDS, "--timeout", 0.2, url=url), 75)


def test_split_client_of_another_version_is_refused(ask, server):
    fault = protocol.Fault("version", "the other side speaks protocol version 1", True)
    for spoil, says in (
        (lambda message, seen: [bytes((9,)) + message[1:]], "speaks protocol version 9"),
        (lambda message, seen: [protocol.encode(fault)], f"the server refuses: {fault.text}"),
    ):
        with relayed(server.port, spoil, token="secret") as port:
            assert says in refused(ask(*IDS, port=port))


def test_split_client_of_a_full_server_is_refused(ask, server, monkeypatch):
    limits = dataclasses.replace(server.server.limits, max_clients=0)
    monkeypatch.setattr(server.server, "limits", limits)
    said = refused(ask(*IDS), 75)
    assert "try again later; give --offline" in said and "start infer.server" not in said


FIELDS = set(
    "prompt_ids token_ids finish_reason rounds accept_lengths tau prefill_s decode_s tokens_per_s"
    " server_calls server_calls_per_token reply_ms rtt_ms bytes_up bytes_down bytes_up_per_token"
    " bytes_down_per_token drafted rounds_drafted_ahead drafting_s waiting_s alone_s drops"
    " unverified rewritten text".split()
)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["stream", "chain"])
def test_split_client_json_is_the_targets_answer_with_figures(mode, ask, pair, tmp_path):
    prompts = tmp_path / "two.jsonl"
    prompts.write_text("".join(json.dumps({"prompt_ids": ids}) + "\n" for ids in (PROMPT, [7])))
    code, out, err = ask("--prompts", prompts, "--stop-ids", "", "--json", "--mode", mode)
    assert code == 0 and out.count("\n") == 1, err
    found = json.loads(out)
    assert found.keys() == {"results", "settings", "traffic"}
    assert found["settings"]["mode"] == mode and not found["settings"]["offline"]
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
    for way in ("bytes_up", "bytes_down"):  # all traffic but Hello and Welcome
        rest = found["traffic"][way] - sum(result[way] for result in found["results"])
        assert 0 < rest < 1000


@pytest.mark.slow
def test_split_client_text_is_all_tokens_and_a_line(ask, pair):
    code, out, err = ask(*IDS)
    (plain,) = pair.plain.generate([PROMPT], NEW, NO_STOP)
    assert code == 0 and out.split() == list(map(str, plain.token_ids))
    assert err.count("\n") == 1 and err.startswith(f"[{NEW} tokens, ")


@pytest.mark.slow
def test_split_client_offline_is_the_drafter_alone(ask):
    code, out, err = ask("--offline", *IDS, "--json")
    assert code == 0, err
    (result,) = json.loads(out)["results"]
    assert (len(result["token_ids"]), result["unverified"]) == (NEW, NEW)
    assert result["server_calls"] == result["drops"] == 0 and result["tau"] is None


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["verify", "keep"])
def test_disconnect_program_reports_it_and_exits_with_0(policy, ask, server, pair, monkeypatch):
    """The link is cut after the first bytes of the answer, and returns later."""
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
