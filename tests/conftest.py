"""Fixtures, and the folders of recorded data as cases for `pytest.mark.parametrize`.

    $MOA_GOLDENS, else ../shared/golden      cases recorded from the authors' code
    $MOA_DATA, else ../shared/data           text to train on and to measure with

Tests that need a missing folder are skipped, with one line that names the folder.
"""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from weakref import WeakSet

import numpy as np
import pytest

# jax reads these when it is imported. Compiling is most of a test's time; with 0 for the second the
# tests take longer and test the programs that users run, which .ci/run does for some files.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.pop("MOA_PAIR", None)  # tests use the bundled pair, not the pair of the user
# Compiled programs go to a folder of the clone, never to the cache of the user.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".jax_cache"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
if os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] != "0":
    one, old = "--xla_cpu_parallel_codegen_split_count=1", "xla_cpu_disable_new_fusion_emitters"
    fast = f"{one} --xla_backend_extra_options={old}"  # the new emitters take twice the time
    os.environ["XLA_FLAGS"] = f"{fast} {os.environ.get('XLA_FLAGS', '')}"

# A shell that runs these tests in its background has them ignore interruptions, and with them every
# process that they start and interrupt.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import jax  # noqa: E402

from infer.cli.program import run as run_program  # noqa: E402
from infer.info import data_folder, golden_folder  # noqa: E402
from moa_jax.decode.background import num_mappings  # noqa: E402
from moa_jax.decode.programs import Programs  # noqa: E402
from moa_jax.errors import InputError  # noqa: E402
from moa_jax.pairs import locate  # noqa: E402

NO_GOLDENS = "no golden data: set MOA_GOLDENS to its folder, or put it at ../shared/golden"
NO_DATA = "no data; set MOA_DATA to its folder, or put it at ../shared/data"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sorts files by their number of slow tests, so that the longest files start first.

    Workers take whole files; xdist keeps this order with `--no-loadscope-reorder`.
    """
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    items.sort(key=lambda item: -slow[item.path])


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> object:
    """Returns a scheduler of whole files that gives one worker all files of tests/engine.

    These files share compiled programs.
    """
    from xdist.scheduler import LoadFileScheduling  # absent if the plugin is off

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            scope = super()._split_scope(nodeid)
            return "tests/engine" if scope.startswith("tests/engine/") else scope

    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_finish() -> None:
    """Excludes imported objects from garbage collection, and collects less often.

    Tracing creates many objects: collections took 6 to 8 % of the time of fast tests.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


# ---- programs of a worker -----------------------------------------------------------------

MOST_MAPPINGS = 30_000  # memory mappings; moa_jax/decode/background.py has the reason
COMPILES_BETWEEN_LOOKS = 20
_programs: WeakSet[Programs] = WeakSet()
_num_compiles = 0


def _count(event: str, *_: float, **__: object) -> None:
    global _num_compiles
    _num_compiles += event.endswith("backend_compile_duration")


jax.monitoring.register_event_duration_secs_listener(_count)


@pytest.fixture(scope="session", autouse=True)
def _known_programs() -> Iterator[None]:
    """Records the program caches of all sessions."""
    init = Programs.__init__

    def noted(self: Programs, *arguments: object, **flags: object) -> None:
        init(self, *arguments, **flags)
        _programs.add(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Programs, "__init__", noted)
        yield


@pytest.fixture(autouse=True)
def _compilation_cache() -> Iterator[None]:
    """Restores JAX's compilation cache, because plans turn the cache off for the process."""
    name = "jax_enable_compilation_cache"
    before = getattr(jax.config, name)
    yield
    if getattr(jax.config, name) != before:
        jax.config.update(name, before)


@pytest.fixture(autouse=True)
def _room_for_programs() -> Iterator[None]:
    """Drops all programs if too many are in memory; JAX's cache restores them."""
    global _num_compiles
    yield
    if _num_compiles < COMPILES_BETWEEN_LOOKS:
        return
    _num_compiles = 0
    if num_mappings() > MOST_MAPPINGS:
        for programs in _programs:
            programs._compiled.clear()
        jax.clear_caches()


class Done(NamedTuple):
    """The exit code of a program and its output."""

    code: int
    out: str
    err: str

    def refusal(self, code: int = 2) -> str:
        """Returns the only line of a refusal with this exit code: the last line on stderr."""
        assert self.code == code and "Traceback" not in self.err, self
        return self.err.rstrip("\n").rpartition("\n")[2]


@pytest.fixture
def run(capsys) -> Callable[..., Done]:
    """Runs a program, such as "infer.generate", in this process: fast, with its main alone."""

    def run(name: str, *arguments: object) -> Done:
        capsys.readouterr()
        with pytest.raises(SystemExit) as end:
            run_program(importlib.import_module(name).main, [str(each) for each in arguments])
        code = end.value.code or 0
        assert isinstance(code, int)
        return Done(code, *capsys.readouterr())

    return run


def slow(*values: object) -> object:
    """Returns the parameters of a slow case."""
    return pytest.param(*values, marks=pytest.mark.slow)


def golden_cases(prefix: str = "", needs: str | None = None, fast: tuple[str, ...] = ()) -> list:
    """Returns the case folders as parameters; the id of each parameter is the folder's name.

    A case folder has a name that starts with `prefix`, and holds the file `needs`. Cases that
    `fast` does not name are slow; without names, none is slow. Without a case, the only parameter
    skips its test and names the missing folder.
    """
    root = golden_folder()
    if root is None:
        return [_skipped(NO_GOLDENS)]
    folders = sorted(path for path in root.glob(f"{prefix}*") if path.is_dir())
    cases = [path for path in folders if needs is None or (path / needs).is_file()]
    if not cases:
        return [_skipped(f"no case {prefix}* with {needs or 'any file'} in {root}")]
    slow_too = lambda path: [pytest.mark.slow] * (bool(fast) and path.name not in fast)
    marks = lambda path: [pytest.mark.golden, *slow_too(path)]
    return [pytest.param(path, id=path.name, marks=marks(path)) for path in cases]


def arrays_of(path: Path) -> dict[str, np.ndarray]:
    """All arrays of an npz file, which is closed again."""
    with np.load(path) as file:
        return dict(file)


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder with `chat/`, `text/` and `specbench/`."""
    return data_folder() or pytest.skip(NO_DATA)


@pytest.fixture(scope="session")
def saved(tmp_path_factory) -> Path:
    """A random pair of each family, in a folder of its name; to be read, not changed."""
    from tests.model_folders import save_random_pair  # torch, which most tests do without
    from tests.oracle.random_pair import FAMILIES

    root = tmp_path_factory.mktemp("pairs")
    for seed, family in enumerate(FAMILIES):
        save_random_pair(root / family, family, seed)
    return root


@pytest.fixture(scope="session")
def small_target(tmp_path_factory) -> Path:
    """The folder of a target trained for a dozen steps; to be read, not changed."""
    from tests.train.test_training import pretrain_config
    from train import pretrain

    folder = tmp_path_factory.mktemp("pretrain")
    pretrain.pretrain(pretrain_config(folder))
    return folder / "target"


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct as a GGUF file in the user's cache; skips if it is unavailable."""
    try:
        return locate("smollm2")[0]
    except InputError as error:
        pytest.skip(str(error))


@pytest.fixture
def pair(saved, tmp_path) -> Path:
    """A copy of the llama pair, to be changed or damaged."""
    shutil.copytree(saved / "llama", tmp_path / "pair")
    return tmp_path / "pair"


def _skipped(reason: str) -> object:
    return pytest.param(None, id="none", marks=[pytest.mark.golden, pytest.mark.skip(reason)])
