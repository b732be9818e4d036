"""infer.bench --serve: what is asked and when, figures, whole documents over toy servers."""

import asyncio
import contextlib
import json
import os
import signal
import threading
import time

import numpy as np
import pytest

from infer import bench
from infer.bench.serving import clients, results, servers
from infer.bench.serving import run as bench_run
from infer.bench.serving.clients import RequestOutcome, arrivals, questions_of, requests_of
from infer.bench.serving.results import percentiles
from infer.bench.serving.run import WARMING, check, parser_of, variants_of
from infer.bench.serving.servers import Server
from infer.openai.metrics import ServingMetrics
from infer.server_process import Child, ended_by_sigterm
from moa_jax.config import DraftShape
from moa_jax.engine import EngineStats
from moa_jax.errors import InputError

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
    assert list(on_mesh) == ["plain", "auto"]
    assert "--mesh tensor=2,data=4" in " ".join(on_mesh["auto"])
    assert variants_of(args_of(""))["auto"] == ["--slots", "16", "--mode", "auto"]


# ---- what is asked ------------------------------------------------------------------------


def test_requests_go_on_with_other_questions():
    args = args_of("--requests 5 --suite demo --temperature 0.5 --seed 7")
    questions = questions_of(args, MOST_TOKENS)
    first, second = (requests_of(args, questions, begin, 5) for begin in (0, 5))
    assert [body["seed"] for body in (*first, *second)] == list(range(7, 17))
    assert len({body["messages"][0]["content"] for body in (*first, *second)}) == 10
    assert questions_of(args, MOST_TOKENS) == questions and len(questions) == 12


def test_questions_that_are_too_long_are_left_out():
    args = args_of("--suite demo --max-new-tokens 100")
    few = questions_of(args, 136)
    assert 0 < len(few) < 12
    texts = {body["messages"][0]["content"] for body in requests_of(args, few, 0, 99)}
    assert texts == set(few)
    with pytest.raises(InputError, match="--max-new-tokens 100: no question of demo"):
        questions_of(args, 101)


def test_arrivals_follow_a_poisson_law():
    times = arrivals(4000, 5.0, seed=3)
    gaps = np.diff(times)
    assert times[0] == 0 and times == arrivals(4000, 5.0, seed=3)
    assert times != arrivals(4000, 5.0, seed=4)
    assert gaps.mean() == pytest.approx(0.2, rel=0.06) == pytest.approx(gaps.std(), rel=0.06)
    # How many come in a second has Poisson's variance, which is its mean.
    counts = np.histogram(times, np.arange(0, int(times[-1])))[0]
    assert counts.var() == pytest.approx(counts.mean(), rel=0.1) == pytest.approx(5.0, rel=0.1)


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


def test_percentiles_by_hand():
    assert percentiles([float(i) for i in range(101)]) == {"p50": 50.0, "p95": 95.0}
    assert percentiles([]) == {"p50": None, "p95": None}


def test_nothing_is_known_where_all_failed():
    failed = [one._replace(error="gone", first=None, tokens=0) for one in OURS]
    row = results.summarise(failed)
    assert (row["failed"], row["tokens_per_s"]) == (3, 0)
    assert row["latency_s"] == {"p50": None, "p95": None}
    compared = results.compare(failed, PLAIN)
    assert compared == {"speedup": None, "compared": 0, "different": []}


# ---- what a server counts -----------------------------------------------------------------


class IdleEngine:
    """What metrics ask an engine for."""

    now = EngineStats(running=0, waiting=0, slots=4, cache_usage=0.0, kept_bytes=0, programs=3)

    def stats(self) -> EngineStats:
        return self.now


def test_counts_are_what_the_servers_own_metrics_say():
    """Two answers: 12 tokens in 5 rounds of a row after their first tokens, 5 drafts accepted."""
    engine = IdleEngine()
    metrics = ServingMetrics("toy", engine)
    before = servers.parse(metrics.text().decode())
    for _ in range(2):
        metrics.first_token.observe(0.1)
    chain, plain = DraftShape(3), DraftShape(1)
    engine.now = engine.now._replace(
        running=3,
        waiting=2,
        prompt_tokens=40,
        generated_tokens=12,
        drafts=4,
        drafted_tokens=8,
        accepted_tokens=5,
        accepted_by_position=(3, 2),
        rounds_by_shape={chain: 3, plain: 1},
        prefix_lookup_tokens=40,
        prefix_tokens=10,
        programs=5,
    )
    after = servers.parse(metrics.text().decode())
    unchanged = after - after
    after.subtract(before)
    found = servers.summarise_counters(after)
    assert found == {"tau": 10 / 5, "compiled": 2}
    assert servers.summarise_counters(unchanged) == {"tau": None, "compiled": 0}


# ---- clients and toy servers --------------------------------------------------------------


class ToyServer:
    """An HTTP server that streams what was asked; `faults` says what happens to some requests.

    The keys of `faults` are seeds, its values "refuse", "cut", "error", "odd" and "other".
    """

    def __init__(self, faults: dict[int, str] | None = None, seconds: float = 0.0) -> None:
        self.faults, self.seconds = faults or {}, seconds
        self.bodies: list[dict] = []
        self.compiling: set[int] = set()  # seeds of requests that a program is made for
        self.running, self.programs = 0, 0
        self._metrics = ServingMetrics("toy", self)

    def stats(self) -> EngineStats:
        return IdleEngine.now._replace(running=self.running, programs=self.programs)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            size = int(head.partition("content-length: ")[2].partition("\r\n")[0] or 0)
            body = json.loads(await reader.readexactly(size)) if size else {}
            path = head.split()[1]
            if path == "/metrics":
                self._reply(writer, self._metrics.text())
            elif path == "/v1/models":
                card = {"id": "toy", "max_model_len": MOST_TOKENS}
                self._reply(writer, json.dumps({"data": [card]}).encode())
            else:
                await self._answer(writer, body)
            await writer.drain()
        except asyncio.IncompleteReadError:  # a client that has left
            pass
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _reply(self, writer: asyncio.StreamWriter, content: bytes, status: str = "200 OK") -> None:
        close = f"HTTP/1.1 {status}\r\ncontent-length: {len(content)}\r\nconnection: close\r\n\r\n"
        writer.write(close.encode() + content)

    async def _answer(self, writer: asyncio.StreamWriter, body: dict) -> None:
        self.bodies.append(body)
        self.programs += body["seed"] in self.compiling
        self.running += 1
        fault, text = self.faults.get(body["seed"]), body["messages"][0]["content"]
        await asyncio.sleep(self.seconds)
        self.running -= 1
        if fault == "refuse":
            error = json.dumps({"error": {"message": "full"}}).encode()
            self._reply(writer, error, "429 Too Many Requests")
            return
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n")
        for event in self._events(fault, text):
            writer.write(f"data: {event}\n\n".encode())

    def _events(self, fault: str | None, text: str):
        def event(delta: dict, finish: str | None = None) -> str:
            return json.dumps({"choices": [{"delta": delta, "finish_reason": finish}]})

        yield event({"role": "assistant", "content": ""})
        yield event({"content": text[:2]})
        if fault == "cut":
            return
        if fault == "odd":
            yield "[1, 2"
        if fault == "error":
            yield json.dumps({"error": {"message": "a pass failed"}})
        yield event({"content": text[2:] + ("!" if fault == "other" else "")}, "stop")
        yield json.dumps({"choices": [], "usage": {"completion_tokens": 4}})
        yield "[DONE]"


@contextlib.contextmanager
def listening(toy: ToyServer):
    """A toy server's URL; it lives in a thread."""
    ready: list[str] = []
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        server = await asyncio.start_server(toy.handle, "127.0.0.1", 0)
        toy.stop = asyncio.Event()
        ready.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        await toy.stop.wait()
        # Closed before, a server of Python 3.11 leaves open whom it accepts at that moment.
        loop.remove_reader(server.sockets[0].fileno())
        while handling := asyncio.all_tasks() - {asyncio.current_task()}:
            await asyncio.gather(*handling, return_exceptions=True)
        server.close()
        await server.wait_closed()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    while not ready:
        time.sleep(0.005)
    try:
        yield ready[0]
    finally:
        loop.call_soon_threadsafe(toy.stop.set)
        thread.join()
        loop.close()


def asked(index: int) -> dict:
    return {"messages": [{"content": f"text {index}"}], "seed": index}


def test_clients_come_at_their_times_and_tell_what_failed():
    toy = ToyServer({1: "refuse", 2: "cut", 3: "error", 4: "odd"})
    times = [0.0, 0.02, 0.05, 0.05, 0.06, 0.2]

    async def play(url: str) -> list[RequestOutcome]:
        async with clients.client_of(url) as client:
            return await clients.open_loop(client, [asked(i) for i in range(6)], times)

    with listening(toy) as url:
        found = asyncio.run(play(url))
    assert [one.error for one in found] == [
        "",
        '429 {"error": {"message": "full"}}',
        "the stream ended before the answer",
        "a pass failed",
        "JSONDecodeError",
        "",
    ]
    began = found[0].due
    assert [one.due - began for one in found] == pytest.approx(times)
    assert all(one.due <= one.end for one in found)
    whole = [found[0], found[5]]
    assert [(one.text, one.tokens) for one in whole] == [("text 0", 4), ("text 5", 4)]
    assert all(one.due < one.first <= one.end for one in whole)


class ToyChild:
    """A process that has not ended."""

    name = "the server of plain"

    def __init__(self, last: str = "") -> None:
        self.last = last

    def check(self) -> None:
        if self.last:
            raise InputError(f"{self.name} ended with code 1: {self.last}")

    def cpu_seconds(self) -> float:
        return 1.0


def measured(toys: list[ToyServer], line: str, monkeypatch) -> dict:
    """The document over toy servers, one for each mode."""
    monkeypatch.setattr(servers, "SAMPLE_SECONDS", 0.01)
    machine = {"device_kind": "toy", "platform": "cpu", "cores": 2}
    args = args_of(line)
    with contextlib.ExitStack() as stack:
        started = [
            Server(mode, stack.enter_context(listening(toy)), ToyChild())
            for mode, toy in zip(variants_of(args), toys, strict=True)
        ]
        document = {"machine": machine}
        with contextlib.suppress(asyncio.CancelledError):
            asyncio.run(bench_run.measure(args, started, document))
        return json.loads(json.dumps(document))


LINE = "--suite demo --modes plain,auto --slots 2"


def test_a_cut_run_has_the_rates_so_far(monkeypatch):
    play, left = bench_run._play, iter(range(3))

    async def cut(server, batch, times):
        if batch[0]["seed"] < WARMING and next(left, None) is None:
            raise asyncio.CancelledError
        return await play(server, batch, times)

    monkeypatch.setattr(bench_run, "_play", cut)
    toys = [ToyServer(), ToyServer()]
    document = measured(toys, f"{LINE} --rates 50,60 --requests 3", monkeypatch)
    assert [(row["rate"], row["mode"]) for row in document["rates"]] == [
        (50.0, "plain"),
        (50.0, "auto"),
    ]
    mark = {"by": "SIGINT", "done": 1, "of": 2}
    assert "CUT by SIGINT after 1 of 2 rates." in results.render(document | {"cut": mark})


def test_all_servers_hear_the_same_and_the_document_tells(monkeypatch, tmp_path):
    toys = [ToyServer(seconds=0.02), ToyServer({5: "other", 6: "refuse"}, seconds=0.01)]
    document = measured(toys, f"{LINE} --rates 90,60 --requests 5", monkeypatch)
    told = [[body for body in toy.bodies if body["seed"] < WARMING] for toy in toys]
    by_seed = [sorted(bodies, key=lambda body: body["seed"]) for bodies in told]
    assert by_seed[0] == by_seed[1] and len(by_seed[0]) == 10
    assert by_seed[0][0]["stream_options"] == {"include_usage": True}
    rows = document["rates"]
    assert [(row["rate"], row["mode"]) for row in rows] == [
        (rate, mode) for rate in (60.0, 90.0) for mode in ("plain", "auto")
    ]
    assert [row["requests"] for row in rows] == [5] * 4
    assert [row["failed"] for row in rows] == [0, 0, 0, 1]
    assert rows[3]["failures"] == {'429 {"error": {"message": "full"}}': 1}
    assert [(row["compared"], row["different"]) for row in rows[2:]] == [(5, []), (4, [5])]
    assert rows[0]["speedup"] == 1 and rows[1]["speedup"] > 0
    assert document["settings"]["dtype"] == "float32" and document["settings"]["questions"] == 12
    shown = results.render(document)
    assert (
        "| 60.00 | plain |" in shown and "4/5, 1 FAILED" not in shown and "3/4, 1 FAILED" in shown
    )
    assert "1 answers DIFFER" in shown
    results.plot(document, tmp_path / "figure.svg")
    assert (tmp_path / "figure.svg").read_text().count("<path") > 20
    assert [path.name for path in tmp_path.iterdir()] == ["figure.svg"]


def test_each_mode_has_a_server(monkeypatch):
    class Starting(contextlib.nullcontext, ToyChild):
        def __init__(self, program, flags, folder, env, of):
            self.env, self.url = env, f"http://{folder.name}/v1"
            self.enter_result, self.last = self, ""

        def ready(self):
            return {"url": self.url}

    monkeypatch.setattr(servers, "Child", Starting)
    monkeypatch.delenv(servers.MEMORY_FRACTION, raising=False)
    with servers.serving(variants_of(args_of("--modes plain,auto"))) as started:
        assert [each.mode for each in started] == ["plain", "auto"]
        assert [each.url for each in started] == ["http://plain", "http://auto"]
        assert {each.child.env[servers.MEMORY_FRACTION] for each in started} == {"0.450"}


def test_what_is_measured_beside_a_compiler_is_told(monkeypatch):
    toys = [ToyServer(), ToyServer()]
    toys[1].compiling = {WARMING + 1}
    document = measured(toys, f"{LINE} --rates 60 --requests 4", monkeypatch)
    for toy in toys:
        warming = [body["seed"] for body in toy.bodies if WARMING <= body["seed"]]
        seeds = [body["seed"] for body in toy.bodies if body["seed"] < WARMING]
        assert sorted(seeds) == list(range(4)) and min(warming) == WARMING
    assert [(row["requests"], row["compiled"]) for row in document["rates"]] == [(4, 0), (4, 0)]
    assert "WERE COMPILED" not in results.render(document)
    toys = [ToyServer(), ToyServer()]
    toys[0].compiling = {0}
    line = f"{LINE} --rates 60 --requests 1"
    assert "1 programs WERE COMPILED" in results.render(measured(toys, line, monkeypatch))


def test_warming_ends_when_nothing_is_compiled_any_more(monkeypatch):
    """One request, two and four at once, each number until a pass compiles nothing."""
    toy = ToyServer()
    toy.compiling = {WARMING, WARMING + 1, WARMING + 4}
    measured([toy, ToyServer()], f"{LINE} --rates 60 --requests 1", monkeypatch)
    warming = [body["seed"] for body in toy.bodies if WARMING <= body["seed"] < 2 * WARMING]
    # one: with a program, with a program, none; two: with a program, none; four: none
    assert sorted(warming) == [WARMING + i for i in range(3 * 1 + 2 * 2 + 4)]


def test_a_mode_that_does_not_answer_is_told_before_measuring(monkeypatch):
    class Refusing(ToyServer):
        async def _answer(self, writer, body) -> None:
            self._reply(writer, b'{"error": {"message": "no chat template"}}', "400 Bad Request")

    with pytest.raises(InputError, match="server of plain does not answer: 400 .*no chat template"):
        measured([Refusing(), ToyServer()], f"{LINE} --requests 2", monkeypatch)


def test_a_server_that_ends_is_named_with_its_last_line():
    with listening(ToyServer()) as url:
        pass

    async def play() -> RequestOutcome:
        async with clients.client_of(url) as client:
            return await clients.send(client, asked(0), 0.0)

    found = asyncio.run(play())
    assert found.error == "ConnectError" and (found.tokens, found.first) == (0, None)
    server = Server("plain", url, ToyChild("killed by nobody"))
    with pytest.raises(InputError, match="server of plain ended with code 1: killed by nobody"):
        asyncio.run(bench_run._play(server, [asked(0)], [0.0]))


# ---- processes ----------------------------------------------------------------------------


def test_a_child_tells_its_last_line_when_it_ends(tmp_path):
    """json.tool has no --port, and takes its number for a file."""
    with Child("json.tool", [], tmp_path / "one") as child:
        with pytest.raises(InputError, match="did not start: .*No such file"):
            child.ready()
        with pytest.raises(InputError, match="json.tool ended with code 2: .*No such file"):
            child.check()


def test_a_child_is_ready_and_computes_and_ends(tmp_path):
    program = tmp_path / "toy_program.py"
    program.write_text(
        "import json, os, sys, time\n"
        "path = sys.argv[sys.argv.index('--ready-file') + 1]\n"
        "sum(range(10**6))\n"
        "with open(path + '.part', 'w') as file:\n"
        "    json.dump({'url': 'u', 'port': 1}, file)\n"
        "os.replace(path + '.part', path)\n"
        "time.sleep(60)\n"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        with Child("toy_program", [], tmp_path / "one", env={"NEW": "1"}) as child:
            assert child.ready() == {"url": "u", "port": 1}
            child.check()
            spent = child.cpu_seconds()
            assert spent is None or spent >= 0
            process = child._process
    assert process.returncode == -signal.SIGTERM


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
    """A small random target, whose chains prompt lookup drafts."""
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


@pytest.mark.slow
def test_a_target_that_is_not_there_is_one_line(run):
    said = run("infer.bench", "--serve", "--target", "./absent", "--modes", "plain").refusal()
    assert "the server of plain did not start: infer.serve: ./absent is not a folder" in said
