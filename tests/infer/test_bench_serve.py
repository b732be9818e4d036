"""infer.bench --serve: its flags, what is asked, figures, and what servers count."""

import pytest

from infer import bench
from infer.bench.serving import results, servers
from infer.bench.serving.clients import RequestOutcome, questions_of, requests_of
from infer.bench.serving.run import check, parser_of, variants_of
from infer.cli import program
from infer.openai.metrics import ServingMetrics
from moa_jax.config import DraftShape
from moa_jax.decode.engine import Load
from moa_jax.errors import InputError

MOST_TOKENS = 1024


def refused(line: str, capfd) -> str:
    """The one line with which the program refuses its flags."""
    with pytest.raises(SystemExit) as ended:
        program.run(bench.main, ["--serve", *line.split()])
    said = capfd.readouterr()
    assert ended.value.code == 2 and not said.out and said.err.count("\n") == 1
    return said.err


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

    now = Load(0, 0, 4, 0.0, 0, 0, 0, 0, 0, 0, (0, 0), {}, 0, 0, 0, 0, {}, 0, 3)

    def load(self) -> Load:
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
        rounds_by_way={chain: 3, plain: 1},
        prefix_lookup_tokens=40,
        prefix_tokens=10,
        compiled=5,
    )
    after = servers.parse(metrics.text().decode())
    unchanged = after - after
    after.subtract(before)
    found = servers.summarise_counters(after)
    assert found == {"tau": 10 / 5, "compiled": 2}
    assert servers.summarise_counters(unchanged) == {"tau": None, "compiled": 0}
