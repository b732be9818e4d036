"""A server of a real pair is killed in the middle of an answer, and a new one goes on with it."""

from __future__ import annotations

import contextlib
import itertools
import signal
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from infer.server_process import Child
from infer.split_client.link import ServerAddress
from infer.split_client.state import ClientOptions
from moa_jax.config import Sampling
from tests.pairs import NO_STOP, Pair, random_pair_of
from tests.split.split_client import answered, run_client

PROMPT = [5, 9, 4, 17, 23]
OPTIONS = ClientOptions(lengths=(1, 3, 7), reconnect_seconds=240, patience=240)


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Pair:
    return random_pair_of(0, tmp_path_factory.mktemp("served"))


@pytest.fixture
def program(pair, tmp_path):
    """Starts infer.server with the pair, on a given port or any; ends all of them."""
    small = ["--target", str(pair.target.folder), "--draft", str(pair.drafter.folder)]
    small += "--dtype float32 --threads 1 --max-tokens 64 --warm 1,4,8".split()
    places = itertools.count()
    with contextlib.ExitStack() as stack:

        def start(port: int = 0) -> tuple[subprocess.Popen, int]:
            given, place = ["--port", str(port), *small], tmp_path / f"{next(places)}"
            child = stack.enter_context(Child("infer.server", given, place))
            return child._process, child.ready()["port"]

        yield start


@pytest.mark.slow
def test_disconnect_server_is_killed_and_restarted(pair, facts, drafter, program):
    """kill -9 ends the server in the middle of an answer; a new process replays it.

    Penalties count the tokens of an answer that the new process reads.
    """
    law = Sampling(1.0, repetition_penalty=1.2, frequency_penalty=0.4, seed=8)
    process, port = program()
    (plain,) = pair.plain.generate([PROMPT], 50, NO_STOP, law)
    starting = []

    def act(index: int, answering) -> None:
        if index == 6:
            process.send_signal(signal.SIGKILL)
            process.wait()
            starting.append(pool.submit(program, port))

    async def work(answering):
        return await answered(answering, PROMPT, 50, (), law, act, seconds=500)

    url = f"ws://127.0.0.1:{port}/v1/split"
    with ThreadPoolExecutor(1) as pool:
        at = ServerAddress(url, facts, codec="int8", timeout=60.0)
        found = run_client(at, OPTIONS, work, drafter)
        starting[0].result()
    assert found.tokens == plain.token_ids and found.counts.drops == 1
    assert found.counts.prompts == 2 and not any(found.kept)
