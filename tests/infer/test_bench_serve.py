"""infer.bench --serve: requests and their times, figures, and documents over toy servers."""

import asyncio
import json
import os
import signal
import time

import httpx
import pytest

from infer import bench
from infer.bench.serving import clients, results, servers
from infer.bench.serving import run as bench_run
from infer.bench.serving.clients import RequestOutcome, questions_of, requests_of
from infer.bench.serving.run import WARMING, check, parser_of, variants_of
from infer.bench.serving.servers import Server
from infer.openai.metrics import ServingMetrics
from infer.server_process import Child, ended_by_sigterm
from moa_jax.config import DraftShape
from moa_jax.engine import EngineStats
from moa_jax.errors import InputError
from tests.meeting import free_port

MOST_TOKENS = 1024


def args_of(line: str):
    args = parser_of("").parse_args(line.split())
    check(args)
    return args


# ---- flags --------------------------------------------------------------------------------


def test_each_mode_has_a_server_with_its_flags():
    args = args_of("--target T --draft B --target-layer-inference 1 --slots 3 --dtype float32")
    found = {mode: " ".join(flags) for mode, flags in variants_of(args).items()}
    assert list(found) == ["plain", "chain", "auto"]
    shared = "--target T --dtype float32 --slots 3 --mode "
    assert found["plain"] == f"{shared}plain"
    assert found["chain"] == f"{shared}chain --draft B --target-layer-inference 1"
    on_mesh = variants_of(args_of("--mesh tensor=2,data=4 --modes auto --rates 1"))
    assert on_mesh["auto"] == "--slots 16 --mesh tensor=2,data=4 --mode auto".split()


# ---- requests -----------------------------------------------------------------------------


def test_requests_continue_with_other_questions():
    args = args_of("--requests 5 --suite demo --temperature 0.5 --seed 7")
    questions = questions_of(args, MOST_TOKENS)
    first, second = (requests_of(args, questions, begin, 5) for begin in (0, 5))
    assert [body["seed"] for body in (*first, *second)] == list(range(7, 17))
    assert len({body["messages"][0]["content"] for body in (*first, *second)}) == 10
    assert questions_of(args, MOST_TOKENS) == questions and len(questions) == 12


def test_a_third_of_requests_is_structured():
    args = args_of("--structured 0.34")
    bodies = requests_of(args, questions_of(args, MOST_TOKENS), 0, 100)
    assert sum("response_format" in body for body in bodies) == 34
    assert not any("response_format" in body for body in bodies[:2])
    with pytest.raises(InputError, match="--structured 1.5; choose from 0 to 1"):
        args_of("--structured 1.5")


def test_questions_that_are_too_long_are_left_out():
    args = args_of("--suite demo --max-new-tokens 100")
    few = questions_of(args, 136)
    assert 0 < len(few) < 12
    texts = {body["messages"][0]["content"] for body in requests_of(args, few, 0, 99)}
    assert texts == set(few)
    with pytest.raises(InputError, match="--max-new-tokens 100: no question of demo"):
        questions_of(args, 101)


# ---- figures ------------------------------------------------------------------------------


def answer(index: int, due: float, first: float | None, end: float, tokens: int = 5, **more):
    more = {"text": "t", "error": ""} | more
    return RequestOutcome(index, due=due, first=first, end=end, tokens=tokens, **more)


PLAIN = [answer(0, 10.0, 10.5, 12.5), answer(1, 11.0, 12.0, 15.0, 7), answer(2, 12.0, 13.0, 20.0)]
OURS = [
    answer(0, 30.0, 30.5, 31.0),
    answer(1, 31.0, 31.5, 33.0, 7, text="u"),
    answer(2, 32.0, None, 32.5, 0, error="429 full"),
]


def test_figures_by_hand():
    row = results.summarise(OURS)
    assert (row["requests"], row["failed"], row["failures"]) == (3, 1, {"429 full": 1})
    assert (row["seconds"], row["tokens"], row["tokens_per_s"]) == (3.0, 12, 4.0)
    assert row["requests_per_s"] == pytest.approx(2 / 3)
    assert row["first_token_ms"] == {"p50": 500.0, "p95": 500.0}
    assert row["ms_per_token"]["p50"] == pytest.approx((125 + 250) / 2)
    assert row["latency_s"]["p50"] == 1.5  # of 1 and 2
    compared = results.compare(OURS, PLAIN)
    assert compared == {"speedup": (2.5 + 2) / 2, "compared": 2, "different": [1]}


# ---- toy servers --------------------------------------------------------------------------


class ToyServer:
    """A server without sockets; `faults` maps a seed to the kind of its failure."""

    def __init__(self, faults: dict[int, str] | None = None) -> None:
        self.faults = faults or {}
        self.bodies: list[dict] = []
        self.compiling: set[int] = set()  # seeds of requests that need a program
        self.now = EngineStats(**dict.fromkeys(EngineStats._fields, 0))._replace(
            accepted_by_position=(0, 0), rounds_by_shape={}
        )
        self.stats = lambda: self.now
        self.metrics = ServingMetrics("toy", self)
        transport = httpx.MockTransport(self.handle)
        self.client = lambda: httpx.AsyncClient(transport=transport, base_url="http://toy")

    async def handle(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/metrics":
            return httpx.Response(200, content=self.metrics.text())
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [{"id": "toy", "max_model_len": MOST_TOKENS}]})
        self.bodies.append(body := json.loads(request.content))
        seed, text = body["seed"], body["messages"][0]["content"]
        self.now = self.now._replace(programs=self.now.programs + (seed in self.compiling))
        await asyncio.sleep(0.01)
        match fault := self.faults.get(seed):
            case "gone":
                raise httpx.ConnectError("gone")
            case "refuse":
                return httpx.Response(429, json={"error": {"message": "full"}})
        end = {"delta": {"content": text[2:] + "!" * (fault == "other")}, "finish_reason": "stop"}
        events: list[dict] = [
            {"choices": [{"delta": {"content": text[:2]}, "finish_reason": None}]},
            {"choices": [end]},
            {"choices": [], "usage": {"completion_tokens": 4}},
        ]
        if fault == "cut":
            del events[1:]
        if fault == "error":
            events[1:1] = [{"error": {"message": "a pass failed"}}]
        lines = [*map(json.dumps, events), "[1, 2" if fault == "odd" else "[DONE]"]
        return httpx.Response(200, text="".join(f"data: {line}\n\n" for line in lines))


def request_body(index: int) -> dict:
    return {"messages": [{"content": f"text {index}"}], "seed": index}


def test_counts_are_those_of_the_servers_metrics():
    """Two answers have 12 tokens in 5 rounds after their first tokens, and 5 accepted drafts."""
    toy = ToyServer()
    before = servers.parse(toy.metrics.text().decode())
    for _ in range(2):
        toy.metrics.first_token.observe(0.1)
    rounds = {DraftShape(3): 3, DraftShape(1): 1}
    counts = dict(generated_tokens=12, accepted_tokens=5, rounds_by_shape=rounds, programs=2)
    toy.now = toy.now._replace(**counts)
    after = servers.parse(toy.metrics.text().decode())
    assert servers.summarise_counters(after - before) == {"tau": 10 / 5, "compiled": 2}
    assert servers.summarise_counters(after - after) == {"tau": None, "compiled": 0}


def test_clients_send_on_schedule_and_report_failures():
    toy = ToyServer({1: "refuse", 2: "cut", 3: "error", 4: "odd", 5: "gone"})
    times = [0.0, 0.02, 0.05, 0.05, 0.06, 0.07, 0.2]

    async def play() -> list[RequestOutcome]:
        async with toy.client() as client:
            return await clients.open_loop(client, [request_body(i) for i in range(7)], times)

    found = asyncio.run(play())
    errors = ['429 {"error":{"message":"full"}}', "the stream ended before the answer"]
    errors += ["a pass failed", "JSONDecodeError", "ConnectError"]
    assert [one.error for one in found] == ["", *errors, ""]
    began = found[0].due
    assert [one.due - began for one in found] == pytest.approx(times)
    whole = [found[0], found[6]]
    assert [(one.text, one.tokens) for one in whole] == [("text 0", 4), ("text 6", 4)]
    assert all(one.due < one.first <= one.end for one in whole)


class ToyChild:
    """A process that is still running."""

    name = "the server of plain"

    def __init__(self, last: str = "") -> None:
        self.last = last

    def check(self) -> None:
        if self.last:
            raise InputError(f"{self.name} ended with code 1: {self.last}")

    def cpu_seconds(self) -> float:
        return 1.0


def measured(toys: list[ToyServer], line: str, monkeypatch) -> dict:
    """Returns the document over toy servers, one for each mode."""
    monkeypatch.setattr(servers, "SAMPLE_SECONDS", 0.01)
    monkeypatch.setattr(clients, "client_of", lambda toy: toy.client())
    args = args_of(f"--suite demo --modes plain,auto --slots 2 {line}")
    started = [Server(*each, ToyChild()) for each in zip(variants_of(args), toys, strict=True)]
    document = {"machine": {"device_kind": "toy", "platform": "cpu", "cores": 2}}
    asyncio.run(bench_run.measure(args, started, document))
    return json.loads(json.dumps(document))


def test_all_servers_get_the_same_requests_and_rows(monkeypatch, tmp_path):
    toys = [ToyServer(), ToyServer({5: "other", 6: "refuse"})]
    document = measured(toys, "--rates 90,60 --requests 5", monkeypatch)
    told = [[body for body in toy.bodies if body["seed"] < WARMING] for toy in toys]
    by_seed = [sorted(bodies, key=lambda body: body["seed"]) for bodies in told]
    assert by_seed[0] == by_seed[1] and len(by_seed[0]) == 10
    assert by_seed[0][0]["stream_options"] == {"include_usage": True}
    rows = document["rates"]
    wanted = [(rate, mode) for rate in (60.0, 90.0) for mode in ("plain", "auto")]
    assert [(row["rate"], row["mode"]) for row in rows] == wanted
    assert [row["requests"] for row in rows] == [5] * 4
    assert [row["failed"] for row in rows] == [0, 0, 0, 1]
    assert rows[3]["failures"] == {'429 {"error":{"message":"full"}}': 1}
    assert [(row["compared"], row["different"]) for row in rows[2:]] == [(5, []), (4, [5])]
    assert rows[0]["speedup"] == 1 and rows[1]["speedup"] > 0
    assert document["settings"]["dtype"] == "float32" and document["settings"]["questions"] == 12
    shown = results.render(document)
    assert "| 60.00 | plain |" in shown and "3/4, 1 FAILED" in shown and "1 answers DIFFER" in shown
    results.plot(document, tmp_path / "figure.svg")
    assert (tmp_path / "figure.svg").read_text().count("<path") > 20


def test_compiles_during_a_measurement_are_reported(monkeypatch):
    toys = [ToyServer(), ToyServer()]
    toys[0].compiling = {0}
    document = measured(toys, "--rates 60 --requests 1", monkeypatch)
    assert [row["compiled"] for row in document["rates"]] == [1, 0]
    assert "1 programs WERE COMPILED" in results.render(document)


def test_a_server_is_warmed_up_by_one_request_and_then_by_two_per_slot(monkeypatch):
    toy = ToyServer()
    measured([toy, ToyServer()], "--rates 60 --requests 1 --slots 4", monkeypatch)
    warming = [body["seed"] for body in toy.bodies if WARMING <= body["seed"]]
    assert warming[0] == WARMING and sorted(warming) == [WARMING + i for i in range(1 + 2 * 4)]


def test_a_mode_that_does_not_answer_is_reported_before_measuring(monkeypatch):
    with pytest.raises(InputError, match="server of plain does not answer: 429 .*full"):
        refusing = ToyServer({WARMING: "refuse"})
        measured([refusing, ToyServer()], "--requests 2", monkeypatch)
    monkeypatch.undo()
    server = Server("plain", f"http://127.0.0.1:{free_port()}", ToyChild("killed"))
    with pytest.raises(InputError, match="server of plain ended with code 1: killed"):
        asyncio.run(bench_run._play(server, [request_body(0)], [0.0]))


# ---- processes ----------------------------------------------------------------------------


def test_a_child_that_ends_reports_its_last_line(tmp_path):
    """json.tool has no --port and reads the port number as a file name."""
    with Child("json.tool", [], tmp_path / "one") as child:
        with pytest.raises(InputError, match="did not start: .*No such file"):
            child.ready()
        with pytest.raises(InputError, match="json.tool ended with code 2: .*No such file"):
            child.check()


def test_sigterm_unwinds():
    before, left = signal.getsignal(signal.SIGTERM), []
    with pytest.raises(SystemExit) as ended, ended_by_sigterm():
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(5)
        finally:
            left.append(True)
    assert ended.value.code == 143 and left
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.slow
def test_a_run_with_servers(talkative, tmp_path, capfd):
    """Runs a small random target; prompt lookup drafts the chains."""
    target, plot = talkative / "target", tmp_path / "figure.png"
    line = f"--serve --target {target} --suite demo --modes plain,chain --slots 1 --ignore-stop "
    line += f"--max-new-tokens 16 --rates 4 --requests 6 --json --plot {plot}"
    assert bench.main(line.split()) == 0
    document = json.loads(capfd.readouterr().out)
    assert "| chain |" in results.render(document) and plot.stat().st_size > 10_000
    for row in document["rates"]:
        assert (row["requests"], row["failed"], row["different"]) == (6, 0, [])
        assert row["compared"] == 6 and row["tokens"] == 6 * 16 and row["tokens_per_s"] > 0
        assert row["tau"] == 1 if row["mode"] == "plain" else row["tau"] >= 1
    assert document["machine"]["platform"] == "cpu"
