"""Real pairs over failing links write the same tokens as without a network; a server is killed."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from infer.bench.network import PROFILES
from infer.bench.suites import load_suite
from infer.cli.flags.pair import DEMO
from infer.server_process import Child
from infer.split_client.link import ServerAddress
from infer.split_client.state import ClientOptions
from moa_jax import Session, load_drafter, load_target
from moa_jax.config import DraftShape, Sampling
from moa_jax.data import chat
from moa_jax.data.tokenizer import load_tokenizer
from moa_jax.pretrained import describe_target
from moa_jax.split.client_drafter import ClientDrafter
from moa_jax.split.pairing import pairing_of
from tests.pairs import NO_STOP, random_pair_of
from tests.split.split_client import (
    answered,
    failing,
    linked,
    relayed,
    run_client,
    serving,
    spoiler,
)

PROMPT, NEW = [5, 9, 4, 17, 23], 40
SOAK_SECONDS = float(os.environ.get("MOA_SOAK_SECONDS", "300"))
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=[1, 0], ids=["n1", "n0"])
def pair(request, tmp_path_factory):
    """Returns a random pair; the drafter reuses this many layers, and some drafts are accepted."""
    return random_pair_of("llama", request.param, tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def server(pair, slots, facts):
    with serving(slots, facts, pair.target.config.vocab_size) as found:
        yield found


def at(port: int, facts: dict, timeout: float = 5.0) -> ServerAddress:
    return ServerAddress(f"ws://127.0.0.1:{port}/v1/split", facts, codec="int8", timeout=timeout)


LAWS = {"greedy": Sampling(), "sampled": Sampling(0.9, top_k=20, seed=7)}
OPTIONS = {
    "chain": ClientOptions(lengths=(1, 2, 4)),
    "tree": ClientOptions(DraftShape(3, 2, 5)),
    "stream": ClientOptions(lengths=(), stream=True),
}
CASES = [  # the drafter's N, settings, options and policy
    (1, "greedy", "chain", "verify"),
    (1, "sampled", "tree", "verify"),
    (1, "greedy", "stream", "verify"),
    (0, "sampled", "chain", "keep"),
    (0, "greedy", "chain", "verify"),
]


@pytest.mark.parametrize(("pair", "law", "name", "policy"), CASES, indirect=["pair"])
def test_disconnect_real_pair_writes_what_one_process_writes(
    pair, facts, server, drafter, law, name, policy
):
    """After each kept part, the tokens are those that the target writes after that text."""
    options, drops = dataclasses.replace(OPTIONS[name], policy=policy), 0
    for seed in range(3):
        with linked(server.port) as proxy:
            given = {"sampling": LAWS[law], "act": failing(proxy, seed, 0.3)}
            work = lambda a, given=given: answered(a, PROMPT, NEW, **given)
            found = run_client(at(proxy.port, facts), options, work, drafter)
            proxy.heal()
        assert len(found.tokens) == NEW and found.done == "length"
        assert policy == "keep" or not any(found.kept)
        drops, place = drops + found.counts.drops, 0
        for kept, part in itertools.groupby(found.kept):
            count = len(list(part))
            if not kept:
                before = PROMPT + found.tokens[:place]
                (plain,) = pair.plain.generate([before], count, NO_STOP, LAWS[law])
                assert found.tokens[place : place + count] == plain.token_ids
            place += count
    assert drops


# The bundled pair, in a separate process


@pytest.fixture
def program(tmp_path):
    """Starts infer.server with the bundled pair, on a given port or any; ends all of them."""
    small, places = ["--threads", "1", "--max-tokens", "512", "--warm", "1,4,8"], itertools.count()
    with contextlib.ExitStack() as stack:

        def start(port: int = 0, *flags: str) -> tuple[subprocess.Popen, int]:
            given, place = ["--port", str(port), *small, *flags], tmp_path / f"{next(places)}"
            child = stack.enter_context(Child("infer.server", given, place))
            return child._process, child.ready()["port"]

        yield start


@pytest.fixture(scope="module")
def demo():
    """Returns the bundled pair: its plain decoding, the client drafter, and facts."""
    target = load_target(DEMO / "target", jnp.float32)
    drafter = load_drafter(DEMO / "draft", target, dtype=jnp.float32)
    client_drafter = ClientDrafter(describe_target(DEMO / "target"), drafter, max_tokens=512)
    return Session(target), client_drafter, pairing_of(target, drafter)


def questions(count: int) -> list[list[int]]:
    """Returns prompts of the bundled questions."""
    tokenizer = load_tokenizer(DEMO / "target")
    return [chat.prompt_ids(tokenizer, each.messages()) for each in load_suite("demo")[:count]]


DEMO_OPTIONS = ClientOptions(lengths=(1, 3, 7), reconnect_seconds=240, patience=240)


def test_disconnect_server_is_killed_and_restarted(demo, program):
    """kill -9 ends the server in the middle of an answer; a new process replays it."""
    session, client_drafter, facts = demo
    process, port = program()
    (prompt,) = questions(1)
    (plain,) = session.generate([prompt], 120, NO_STOP)
    starting = []

    def act(index: int, answering) -> None:
        if index == 6:
            process.send_signal(signal.SIGKILL)
            process.wait()
            starting.append(pool.submit(program, port))

    async def work(answering):
        return await answered(answering, prompt, 120, act=act, seconds=500)

    with ThreadPoolExecutor(1) as pool:
        found = run_client(at(port, facts, 60), DEMO_OPTIONS, work, client_drafter)
        starting[0].result()
    assert found.tokens == plain.token_ids and found.counts.drops == 1
    assert found.counts.prompts == 2 and not any(found.kept)


NETWORKS = ["loopback", "4g", "far"]


def test_disconnect_many_questions_over_three_networks(demo, program):
    """The tokens equal local plain decoding over each network.

    Links are cut, refused and reset at random bytes; messages arrive twice, late, never, truncated,
    or again after a while. All networks run at once.
    """
    session, client_drafter, facts = demo
    _, port = program()
    prompts = questions(6)

    def answer_all(profile: str) -> list[Any]:
        spoil = spoiler(NETWORKS.index(profile), 12, 0.05)
        with relayed(port, spoil) as spoiled, linked(spoiled, PROFILES[profile]) as proxy:

            async def work(answering):
                return [
                    await answered(answering, p, 32, act=failing(proxy, index, 0.2), seconds=500)
                    for index, p in enumerate(prompts)
                ]

            # A lost message costs this time.
            options = dataclasses.replace(DEMO_OPTIONS, patience=8)
            found = run_client(at(proxy.port, facts, 8), options, work, client_drafter.twin())
            proxy.heal()
        return found

    with ThreadPoolExecutor(len(NETWORKS)) as pool:
        answers_of = dict(zip(NETWORKS, pool.map(answer_all, NETWORKS), strict=True))
    plain = [session.generate([prompt], 32, NO_STOP)[0].token_ids for prompt in prompts]
    for profile, answers in answers_of.items():
        assert [found.tokens for found in answers] == plain, profile
        assert sum(found.counts.drops for found in answers) > 1, profile


def test_disconnect_soak_of_32_clients(demo, program):
    """MOA_SOAK_SECONDS limits the time: answers are right, and the server's memory is flat."""
    session, client_drafter, facts = demo
    process, port = program(0, "--slots", "16", "--queue-seconds", "200")
    prompts = questions(8)
    plain = [session.generate([prompt], 16, NO_STOP)[0].token_ids for prompt in prompts]
    sizes, end = [], time.monotonic() + SOAK_SECONDS

    with linked(port) as proxy:

        def one(number: int) -> int:
            count, own = 0, client_drafter.twin()

            async def work(answering):
                nonlocal count
                while time.monotonic() < end or not count:
                    which = (number + count) % len(prompts)
                    act = failing(proxy, number * 1000 + count, 0.005 if number % 8 == 0 else 0)
                    found = await answered(answering, prompts[which], 16, act=act, seconds=500)
                    assert found.tokens == plain[which]
                    count += 1

            where = proxy.port if number % 4 == 0 else port
            run_client(at(where, facts, 60), DEMO_OPTIONS, work, own)
            return count

        with ThreadPoolExecutor(32) as clients:
            running = [clients.submit(one, number) for number in range(32)]
            while not all(client.done() for client in running):
                pages = Path(f"/proc/{process.pid}/statm").read_text().split()[1]
                sizes.append(int(pages) * os.sysconf("SC_PAGE_SIZE") / 2**20)
                time.sleep(1)
        assert all(client.result() for client in running)
    # A pass allocates memory, so the least size shows memory that stays between passes.
    third = len(sizes) // 3
    before, after = sizes[third : 2 * third], sizes[2 * third :]  # all programs are compiled
    assert min(after) < min(before) * 1.03 + 10, sizes
    assert max(after) < 1.5 * min(before), sizes
    assert process.poll() is None
