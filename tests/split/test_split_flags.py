"""Flags that infer.client, infer.server and infer.bench --split refuse with one line."""

from __future__ import annotations

import pytest

from infer import bench, client, server
from infer.cli import program

PROGRAMS = {
    "client": client.main,
    "server": server.main,
    "bench": lambda arguments: bench.main(["--split", *arguments]),
}
FILES = {"empty": "\n", "words": "two words\n", "junk": "no PEM\n"}
WS, WSS = "client --connect ws://127.0.0.1:1/", "client --connect wss://127.0.0.1:1/"
REFUSED = {  # the program with its flags, and what the one line says
    "client": "one of the arguments --connect --offline is required",
    "client --connect http://127.0.0.1:1/": "give ws://HOST:PORT/v1/split",
    "client --connect ws://127.0.0.1:99999/v1/split": "give ws://HOST:PORT/v1/split",
    "client --connect ws://a..b/v1/split": "give ws://HOST:PORT/v1/split",
    f"{WS} --token-file {{words}}": "one word of printable ASCII",
    f"{WS} --tls-ca {{junk}}": "--tls-ca is for wss:// servers",
    f"{WSS} --tls-ca {{junk}}": "holds no certificate",
    f"{WSS} --tls-ca {{absent}}": "no such file",
    f"{WS} --logit-bias 3:1": "logit_bias cannot be sent",
    "client --offline --timeout 0": "not a number above 0",
    "client --offline --reconnect-seconds inf": "not a number above 0",
    "client --offline --client-slowdown 0.5": "choose 1 or more",
    "client --offline --lengths 65": "from 1 to 64",
    "client --offline --depth 3": "add --mode tree",
    "client --offline --mode tree --depth 1": "drafts nothing",
    "client --offline --mode tree --lengths 3": "--lengths are those of chains; leave it out",
    f"{WS} --mode stream --no-ahead": "--mode stream drafts nothing",
    "client --offline --target {absent}": "--target without --draft; name its drafter",
    "server --host 0.0.0.0": "lets other machines in; give --token-file, or --open",
    "server --token-file {absent}": "no such file",
    "server --token-file {empty}": "one word of printable ASCII",
    "server --tls-cert {junk}": "no certificate with its key",
    "server --tls-key {junk}": "--tls-key without --tls-cert",
    "server --port 70000": "not a port from 0 to 65535",
    "server --chunk 1": "choose 2 at least",
    'server --speculative-config {{"num_speculative_tokens":3}}': "give --lengths to infer.client",
    "server --chunk 5000": "--chunk 5000: clients take at most 4096 at once",
    "server --max-nodes 64": "--max-nodes 64; choose from 1 to 63",
    "server --warm 100": "--warm 100: drafts have at most 64 nodes with the root; lower it",
    "server --warm 1,9 --max-nodes 7": "--warm 9: drafts have at most 8 nodes",
    "server --ready-file {absent}/x.json": "no file can be written there; choose another path",
    "server --host nowhere.invalid --open": "give an address of this machine",
    "bench --modes chain,rail": "--modes chain,rail; choose from stream, plain, chain, tree",
    "bench --profiles 6g": "choose from loopback, wired, 5g, 4g, far",
    "bench --tree 1,2,3": "--tree takes depth (2 or more)",
    "bench --clients 8 --plot x.png": "unrecognized arguments: --clients 8 --plot x.png",
    "bench --draft {absent}": "absent is not a folder",
    "bench --draft lookup": "--draft lookup cannot write token by token, as chain asks",
}


@pytest.mark.parametrize("line", REFUSED)
def test_split_programs_refuse_flags_with_one_line(line, tmp_path, capsys):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    paths = {name: tmp_path / name for name in (*FILES, "absent")}
    name, *flags = line.format(**paths).split()
    with pytest.raises(SystemExit) as exit:
        program.run(PROGRAMS[name], flags)
    shown = capsys.readouterr()
    assert (exit.value.code, shown.out) == (2, "") and shown.err.count("\n") == 1
    assert REFUSED[line] in shown.err
