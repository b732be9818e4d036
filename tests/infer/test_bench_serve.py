"""infer.bench --serve: its flags, what is asked, figures, and what servers count."""

from itertools import islice

import pytest

from infer import bench, program
from infer.evaluation.suites import DEMO, PAPER
from infer.openai.metrics import ServingMetrics
from infer.serving.bench import counts, figures, questions, run, tables
from infer.serving.bench.clients import RequestOutcome
from infer.serving.bench.figures import Capacity
from infer.serving.bench.flags import check, parser_of, ways_of
from infer.serving.bench.questions import Asked, Questions
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


FOUR = run.Played(4.0, None, None, [])  # requests a second


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
        ("--modes plain,quick", "--modes plain,quick: choose from"),
        ("--modes chain,auto", "--modes lacks plain"),
        ("--modes plain --draft a=X", "--draft with --modes plain"),
        ("--modes plain --chain-depth 3", "--chain-depth without chain"),
        ("--draft a=X --draft a=Y", "two ways are named a chain"),
        ("--servers 3 --repeats 4", "--servers 3 cannot have equal parts of --repeats 4"),
        ("--temperature -1", "temperature is -1.0"),
        ("--output absent/x.json", "no file can be written there"),
        ("--plot x.gif", "--plot x.gif"),
        ("--split", "--split and --serve are two benchmarks"),
        ("--sweep-depth 3", "unrecognized arguments: --sweep-depth"),
    ],
)
def test_bad_flags_get_one_line(line, said, capfd):
    assert said in refused(line, capfd)


def test_each_way_has_a_server_with_its_flags():
    args = args_of("--target T --draft a=A --draft B,n=1 --chain-depth 4 --slots 3 --dtype float32")
    found = {way.label: way for way in ways_of(args)}
    assert list(found) == ["plain", "a chain", "B chain", "a auto", "B auto"]
    shared = "--target T --dtype float32 --slots 3 --mode "
    assert " ".join(found["plain"].flags) == f"{shared}plain"
    assert " ".join(found["a auto"].flags) == f"{shared}auto --draft A"
    last = f"{shared}chain --draft B --target-layer-inference 1 --depth 4"
    assert " ".join(found["B chain"].flags) == last
    assert [way.label for way in ways_of(args_of(""))] == ["plain", "chain", "auto"]
    alone = ways_of(args_of("--target T --slots 3"))[2]
    shared = "--target T --slots 3 --mode "
    assert (alone.draft, " ".join(alone.flags)) == ("lookup", f"{shared}auto --draft lookup")
    on_mesh = ways_of(args_of("--mesh tensor=2,data=4 --modes auto --rates 1"))[0].flags
    assert "--mesh tensor=2,data=4" in " ".join(on_mesh)
    assert ways_of(args_of(""))[2].flags == ("--slots", "16", "--mode", "auto")


# ---- what is asked ------------------------------------------------------------------------


def test_cells_go_on_with_other_questions_at_other_times():
    args = args_of("--seconds 20 --suite demo --temperature 0.5 --seed 7")
    asked = Questions(args, MOST_TOKENS)
    first = run.cell_of(args, asked, FOUR, 0)
    second = run.cell_of(args, asked, FOUR, len(first.asks))
    assert 60 < len(first.asks) < 100 and first.times[-1] < 20
    assert first.times[1:4] != second.times[1:4]
    indices = [each.index for cell in (first, second) for each in cell.asks]
    assert indices == list(range(len(indices)))
    assert [each.body["seed"] for each in first.asks[:3]] == [7, 8, 9]
    assert run.cell_of(args, Questions(args, MOST_TOKENS), FOUR, 0) == first
    few = run.cell_of(args_of("--requests 5 --modes plain"), asked, FOUR, 0)
    assert (len(few.asks), len(few.times)) == (5, 5)


def test_questions_that_are_too_long_are_left_out():
    args = args_of("--suite demo --max-new-tokens 100")
    few = Questions(args, 136)
    assert few.count + few.left_out == 12 and 0 < few.count < 12
    texts = {each.body["messages"][0]["content"] for each in islice(few.from_(0), 99)}
    assert len(texts) == few.count
    with pytest.raises(InputError, match="--max-new-tokens 100: no question of demo"):
        Questions(args, 101)
    sets = {each.set for each in islice(Questions(args, 999).from_(0), 12)}
    assert sets == {f"demo-{name}" for name in PAPER}


def test_the_bundled_questions_stand_in_for_the_papers(monkeypatch, tmp_path):
    monkeypatch.setenv("MOA_DATA", str(tmp_path))
    assert questions.default_suite() == "demo"
    (tmp_path / "specbench").symlink_to(DEMO)
    assert questions.default_suite() == "paper"
    monkeypatch.setenv("MOA_DATA", str(tmp_path / "absent"))
    assert questions.default_suite() == "demo"


# ---- figures ------------------------------------------------------------------------------


def answer(index: int, due: float, first: float | None, end: float, tokens: int = 5, **more):
    more = {"text": "t", "error": "", "sent": due} | more
    return RequestOutcome(
        Asked(index, "qa", {}), due=due, first=first, end=end, tokens=tokens, **more
    )


PLAIN = [answer(0, 10.0, 10.5, 12.5), answer(1, 11.0, 12.0, 15.0, 7), answer(2, 12.0, 13.0, 20.0)]
OURS = [
    answer(0, 30.0, 30.5, 31.0, sent=30.25),
    answer(1, 31.0, 31.5, 33.0, 7, text="u"),
    answer(2, 32.0, None, 32.5, 0, error="429 full"),
]


def test_figures_by_hand():
    row = figures.summarise([OURS])
    assert (row["requests"], row["failed"], row["failures"]) == (3, 1, {"429 full": 1})
    assert (row["seconds"], row["tokens"], row["tokens_per_s"]) == (3.0, 12, 4.0)
    assert row["requests_per_s"] == pytest.approx(2 / 3)
    assert row["first_token_ms"] == {"p50": 500.0, "p95": 500.0}
    assert row["ms_per_token"]["p50"] == pytest.approx((125 + 250) / 2)
    assert row["latency_s"]["p50"] == 1.5  # of 1 and 2
    assert row["sent_late_ms"] == pytest.approx(225.0)
    beside = figures.beside([OURS], [PLAIN])
    assert (beside["speedup"], beside["compared"]) == ((2.5 + 2) / 2, 2)
    assert beside["throughput_over_plain"] == pytest.approx(4.0 / (17 / 10))
    assert beside["p95_over_plain"] == pytest.approx(7.6 / 1.95)
    assert figures.differences([OURS], [PLAIN], {"way": "auto"}) == [
        {"way": "auto", "request": 1, "set": "qa"}
    ]


def test_repeats_are_counted_together_and_shown_alone():
    """Their times are added up; whatever lies between them belongs to none."""
    later = [one._replace(asked=one.asked._replace(index=9), end=90.0) for one in OURS[:1]]
    plain = [one._replace(asked=one.asked._replace(index=9), end=130.0) for one in PLAIN[:1]]
    row = figures.summarise([OURS, later])
    assert (row["requests"], row["tokens"], row["seconds"]) == (4, 17, 3.0 + 60.0)
    assert row["latency_s"]["p50"] == 2.0  # of 1, 2 and 60
    beside = figures.beside([OURS, later], [PLAIN, plain])
    assert (beside["speedup"], beside["compared"]) == (2.0, 3)  # of 2.5, 2 and 2
    assert [one["speedup"] for one in beside["runs"]] == [(2.5 + 2) / 2, 2.0]
    over = [one["throughput_over_plain"] for one in beside["runs"]]
    assert over == pytest.approx([4.0 / (17 / 10), 2.0])


def test_nothing_is_known_where_all_failed():
    failed = [one._replace(error="gone", first=None, tokens=0) for one in OURS]
    row = figures.summarise([failed]) | figures.beside([failed], [PLAIN])
    assert (row["failed"], row["tokens_per_s"], row["speedup"], row["compared"]) == (3, 0, None, 0)
    assert row["latency_s"] == {"p50": None, "p95": None}
    assert figures.differences([failed], [PLAIN], {}) == []


def test_capacity_counts_what_lies_between_two_times():
    found = figures.capacity_of(
        [
            answer(0, 0.0, 1.0, 4.0, 8),  # half of it
            answer(1, 3.0, 3.5, 5.0, 4),
            answer(2, 5.0, 6.0, 9.0, 8),  # a quarter
            answer(3, 7.0, 8.0, 9.0),
            answer(4, 3.0, None, 5.0, 0, error="gone"),
        ],
        2.0,
        6.0,
    )
    assert found == Capacity(1.75 / 4, (4 + 4 + 2) / 4)


def test_the_worst_of_all_rates():
    names = ("speedup", "throughput_over_plain", "p95_over_plain")
    ratios = {0.5: (None, None, 0.1), 1.0: (1.5, 1.0, None), 2.0: (1.1, 0.9, 1.2)}
    rows = [
        {"rate": rate, "clients": None, "runs": [dict(zip(names, known, strict=True))] * 2}
        | dict(zip(names, known, strict=True))
        for rate, known in ratios.items()
    ]
    twice = lambda rate, value: dict(rate=rate, clients=None, value=value, runs=[value] * 2)
    assert figures.worst(rows) == {
        "speedup_at_lowest_rate": twice(1.0, 1.5),
        "lowest_throughput_over_plain": twice(2.0, 0.9),
        "lowest_p95_over_plain": twice(2.0, 1.2),
    }
    assert tables._sure({"value": 0.987, "runs": [0.96, None, 1.02]}) == "0.987 (0.96 to 1.02)"


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
    before = counts.counts_of(metrics.text().decode())
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
    after = counts.counts_of(metrics.text().decode())
    found = counts.what_server_did(counts.growth(before, after))
    assert found == {
        "tau": 10 / 5,
        "acceptance_rate": 5 / 8,
        "rounds": 4,
        "shares": {"chain 3": 0.75, "plain": 0.25},
        "prompt_tokens": 40,
        "prefix_share": 0.25,
        "failed_passes": 0,
        "compiled": 2,
    }
    idle = counts.what_server_did(counts.growth(after, after))
    assert (idle["tau"], idle["acceptance_rate"], idle["shares"]) == (None, None, {})
    seen = [(1.0, before), (2.0, after), (9.0, before)]
    until = lambda end: counts.mean_in_use(counts.seen_until(seen, end))
    assert until(2.5) == {"slots_in_use": 1.5, "waiting": 1.0}
    assert until(0.5) == {"slots_in_use": 0.0, "waiting": 0.0}
    assert counts.mean_in_use([]) == {"slots_in_use": None, "waiting": None}
