"""infer.bench --serve: its flags, what is asked, figures, and what servers count."""

from itertools import islice

import pytest

from infer import bench
from infer.bench.serving import clients, results, run, servers
from infer.bench.serving.clients import RequestOutcome, Requests, SampleRequest
from infer.bench.serving.flags import check, parser_of, variants_of
from infer.bench.suites import DEMO, PAPER
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


FOUR = run.LoadPoint(4.0, None, None)  # requests a second


def args_of(line: str):
    args = parser_of("").parse_args(line.split())
    check(args)
    return args


# ---- flags --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--rates 0", "'0' is no rate above 0"),
        ("--rates 1,nan", "'nan' is no rate"),
        ("--rates 1,fast", "'fast' is no rate"),
        ("--rates 1.5c", "'1.5c' is no rate"),
        ("--rates 0c", "'0c' is no rate"),
        ("--rates ,", "no rate"),
        ("--requests 3 --seconds 2", "not allowed with"),
        ("--modes plain,quick", "--modes plain,quick; choose from"),
        ("--modes chain,auto", "--modes lacks plain"),
        ("--modes plain --draft a=X", "--draft with --modes plain"),
        ("--chain-depth 3", "unrecognized arguments: --chain-depth"),
        ("--output x.json", "unrecognized arguments: --output"),
        ("--draft a=X --draft a=Y", "two ways are named a chain"),
        ("--servers 3 --repeats 4", "--servers 3 cannot have equal parts of --repeats 4"),
        ("--temperature -1", "temperature is -1.0"),
        ("--plot x.gif", "--plot x.gif"),
        ("--split", "--split and --serve are two benchmarks"),
        ("--sweep-depth 3", "unrecognized arguments: --sweep-depth"),
    ],
)
def test_bad_flags_get_one_line(line, said, capfd):
    assert said in refused(line, capfd)


def test_each_way_has_a_server_with_its_flags():
    args = args_of("--target T --draft a=A --draft B,n=1 --slots 3 --dtype float32")
    found = {each.label: each for each in variants_of(args)}
    assert list(found) == ["plain", "a chain", "B chain", "a auto", "B auto"]
    shared = "--target T --dtype float32 --slots 3 --mode "
    assert " ".join(found["plain"].flags) == f"{shared}plain"
    assert " ".join(found["a auto"].flags) == f"{shared}auto --draft A"
    last = f"{shared}chain --draft B --target-layer-inference 1"
    assert " ".join(found["B chain"].flags) == last
    assert [each.label for each in variants_of(args_of(""))] == ["plain", "chain", "auto"]
    alone = variants_of(args_of("--target T --slots 3"))[2]
    shared = "--target T --slots 3 --mode "
    assert (alone.draft, " ".join(alone.flags)) == ("lookup", f"{shared}auto --draft lookup")
    on_mesh = variants_of(args_of("--mesh tensor=2,data=4 --modes auto --rates 1"))[0].flags
    assert "--mesh tensor=2,data=4" in " ".join(on_mesh)
    assert variants_of(args_of(""))[2].flags == ("--slots", "16", "--mode", "auto")


# ---- what is asked ------------------------------------------------------------------------


def batch_of(args, source: Requests, begin: int) -> tuple[list[SampleRequest], list[float]]:
    times = run.times_of(args, FOUR, begin)
    return list(islice(source.from_(begin), len(times))), times


def test_cells_go_on_with_other_questions_at_other_times():
    args = args_of("--seconds 20 --suite demo --temperature 0.5 --seed 7")
    source = Requests(args, MOST_TOKENS)
    (first, times), (second, later) = batches = [
        batch_of(args, source, 0),
        batch_of(args, source, len(run.times_of(args, FOUR, 0))),
    ]
    assert 60 < len(first) < 100 and times[-1] < 20
    assert times[1:4] != later[1:4]
    indices = [each.index for batch in (first, second) for each in batch]
    assert indices == list(range(len(indices)))
    assert [each.body["seed"] for each in first[:3]] == [7, 8, 9]
    assert batch_of(args, Requests(args, MOST_TOKENS), 0) == batches[0]
    assert len(run.times_of(args_of("--requests 5 --modes plain"), FOUR, 0)) == 5


def test_questions_that_are_too_long_are_left_out():
    args = args_of("--suite demo --max-new-tokens 100")
    few = Requests(args, 136)
    assert few.count + few.left_out == 12 and 0 < few.count < 12
    texts = {each.body["messages"][0]["content"] for each in islice(few.from_(0), 99)}
    assert len(texts) == few.count
    with pytest.raises(InputError, match="--max-new-tokens 100: no question of demo"):
        Requests(args, 101)
    sets = {each.set for each in islice(Requests(args, 999).from_(0), 12)}
    assert sets == {f"demo-{name}" for name in PAPER}


def test_the_bundled_questions_stand_in_for_the_papers(monkeypatch, tmp_path):
    monkeypatch.setenv("MOA_DATA", str(tmp_path))
    assert clients.default_suite() == "demo"
    (tmp_path / "specbench").symlink_to(DEMO)
    assert clients.default_suite() == "paper"
    monkeypatch.setenv("MOA_DATA", str(tmp_path / "absent"))
    assert clients.default_suite() == "demo"


# ---- figures ------------------------------------------------------------------------------


def answer(index: int, due: float, first: float | None, end: float, tokens: int = 5, **more):
    more = {"text": "t", "error": "", "sent": due} | more
    request = SampleRequest(index, "qa", {})
    return RequestOutcome(request, due=due, first=first, end=end, tokens=tokens, **more)


PLAIN = [answer(0, 10.0, 10.5, 12.5), answer(1, 11.0, 12.0, 15.0, 7), answer(2, 12.0, 13.0, 20.0)]
OURS = [
    answer(0, 30.0, 30.5, 31.0, sent=30.25),
    answer(1, 31.0, 31.5, 33.0, 7, text="u"),
    answer(2, 32.0, None, 32.5, 0, error="429 full"),
]


def test_figures_by_hand():
    row = results.summarise([OURS])
    assert (row["requests"], row["failed"], row["failures"]) == (3, 1, {"429 full": 1})
    assert (row["seconds"], row["tokens"], row["tokens_per_s"]) == (3.0, 12, 4.0)
    assert row["requests_per_s"] == pytest.approx(2 / 3)
    assert row["first_token_ms"] == {"p50": 500.0, "p95": 500.0}
    assert row["ms_per_token"]["p50"] == pytest.approx((125 + 250) / 2)
    assert row["latency_s"]["p50"] == 1.5  # of 1 and 2
    assert row["in_flight"] == 1.0  # 1 s and 2 s of 3
    beside = results.compare([OURS], [PLAIN])
    assert beside["speedup"] == (2.5 + 2) / 2
    assert beside["throughput_over_plain"] == pytest.approx(4.0 / (17 / 10))
    assert beside["p95_over_plain"] == pytest.approx(7.6 / 1.95)
    assert results.differences([OURS], [PLAIN]) == {"compared": 2, "different": [1]}


def test_repeats_are_counted_together():
    """Their times are added up; whatever lies between them belongs to none."""
    later = [one._replace(request=one.request._replace(index=9), end=90.0) for one in OURS[:1]]
    plain = [one._replace(request=one.request._replace(index=9), end=130.0) for one in PLAIN[:1]]
    row = results.summarise([OURS, later])
    assert (row["requests"], row["tokens"], row["seconds"]) == (4, 17, 3.0 + 60.0)
    assert row["latency_s"]["p50"] == 2.0  # of 1, 2 and 60
    beside = results.compare([OURS, later], [PLAIN, plain])
    assert beside["speedup"] == 2.0  # of 2.5, 2 and 2


def test_nothing_is_known_where_all_failed():
    failed = [one._replace(error="gone", first=None, tokens=0) for one in OURS]
    row = results.summarise([failed]) | results.compare([failed], [PLAIN])
    assert (row["failed"], row["tokens_per_s"], row["speedup"]) == (3, 0, None)
    assert row["latency_s"] == {"p50": None, "p95": None}
    assert results.differences([failed], [PLAIN]) == {"compared": 0, "different": []}


def test_capacity_counts_until_the_last_request_is_sent():
    found = results.capacity_of(
        [
            answer(0, 2.0, 2.5, 4.0, 8),
            answer(1, 4.0, 4.5, 6.0, 4),
            answer(2, 2.0, 6.0, 10.0, 8),  # half of it
            answer(3, 6.0, 8.0, 9.0),  # the last one
        ]
    )
    assert found == [2.5 / 4, (8 + 4 + 4) / 4]


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
    assert found == {
        "tau": 10 / 5,
        "acceptance_rate": 5 / 8,
        "shares": {"chain 3": 0.75, "plain": 0.25},
        "compiled": 2,
    }
    idle = servers.summarise_counters(unchanged)
    assert (idle["tau"], idle["acceptance_rate"], idle["shares"]) == (None, None, {})
