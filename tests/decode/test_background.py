"""The background worker runs jobs in order, each job once, and never delays an exiting process."""

import signal
import subprocess
import sys
import threading

import pytest

from moa_jax.decode import background as background_lib
from moa_jax.decode.background import BackgroundWorker


def test_jobs_are_done_in_order_and_once(caplog):
    done, begin = [], threading.Event()
    background = BackgroundWorker()
    assert background.submit("wait", begin.wait) and background.is_busy
    for index, name in enumerate("abab"):
        is_new = background.submit(name, lambda name=name: done.append(name))
        assert is_new == (index < 2)
    background.submit("broken", lambda: 1 / 0)
    background.submit("c", lambda: done.append("c"))
    assert not done
    begin.set()
    background.wait()
    assert not background.is_busy
    assert done == ["a", "b", "c"] and "division by zero" in caplog.text
    background.submit("d", lambda: done.append("d"))
    background.wait()
    background.wait()
    assert done[3:] == ["d"]


def test_a_job_that_fails_runs_again_when_it_is_submitted_again(caplog):
    """A failing job runs at most three times, each with its traceback in the log."""
    background, tries = BackgroundWorker(), []

    def fails_twice() -> None:
        tries.append(len(tries))
        if len(tries) < 3:
            raise ValueError("a hiccup of the compiler")

    for job, name in [(fails_twice, "recovers"), (lambda: tries.append(tries[9]), "never")]:
        given = []
        for _ in range(5):
            given.append(background.submit(name, job))
            background.wait()
        assert given == [True, True, True, False, False]
    assert tries == [0, 1, 2]
    assert caplog.text.count("in fails_twice") == 2 and caplog.text.count("IndexError") == 3
    assert "try 3 of 3" in caplog.text


CODE = """
import sys, threading, time, weakref
from moa_jax.decode.background import BackgroundWorker
weakref.finalize(BackgroundWorker, print, "finalized")  # like a constant of a trace
background, begun, both = BackgroundWorker(), threading.Event(), threading.Event()

def until_the_other_is_dropped():
    begun.set()
    both.wait()
    while background._jobs or sys.argv[1:] == ["or for ever"]:
        time.sleep(0.01)
    print("done", flush=True)

background.submit(1, until_the_other_is_dropped)
begun.wait()
background.submit(2, lambda: print("not begun", flush=True))
both.set()
print("ends", flush=True)
"""


def test_a_process_that_ends_drops_queued_jobs():
    """Finalizers run after the running job, since they break the traces of jax."""
    ran = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, timeout=300)
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "ends\ndone\nfinalized\n", "")


def test_exit_now_does_not_wait_for_a_running_job():
    """`exit_now` exits with its own code and flushes stdout; without a running job it returns."""
    code = CODE + "print('last'); background.exit_now(7); print('never')"
    ran = subprocess.run(
        [sys.executable, "-c", code, "or for ever"], capture_output=True, text=True, timeout=300
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (7, "ends\nlast\n", "")
    BackgroundWorker().exit_now(7)


def test_an_interrupted_wait_ends_the_process():
    """The process ends at once, without output, with the exit code of an interruption."""
    waits = "wait = background.wait; background.wait = lambda: (print('waits', flush=True), wait())"
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, "-c", CODE + waits, "or for ever"]
    with subprocess.Popen(command, **pipes) as process:
        try:
            said = [process.stdout.readline() for _ in range(2)]
            process.send_signal(signal.SIGINT)
            out, error = process.communicate(timeout=300)
        finally:
            process.kill()
    assert said == ["ends\n", "waits\n"]
    assert (process.returncode, out, error) == (130, "", "")


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not count mappings")
def test_programs_are_compiled_while_memory_mappings_are_left(monkeypatch, tmp_path):
    most, num_mappings = tmp_path / "max_map_count", background_lib.num_mappings()
    monkeypatch.setattr(background_lib, "MOST", most)
    for share, is_left in ((2, True), (1, False)):
        most.write_text(f"{num_mappings * share}\n")
        assert background_lib.can_compile_more() == is_left
    monkeypatch.setattr(background_lib, "MOST", tmp_path / "absent")
    monkeypatch.setattr(background_lib, "MAPPINGS", tmp_path / "absent")
    assert background_lib.can_compile_more() and background_lib.num_mappings() == 0


def test_without_room_for_mappings_no_job_is_accepted(monkeypatch, caplog):
    monkeypatch.setattr("moa_jax.decode.background.can_compile_more", lambda: False)
    background = BackgroundWorker()
    assert not any(background.submit(name, print) for name in "ab")
    assert caplog.text.count("no more programs are compiled") == 1


def test_a_job_that_meets_a_full_device_is_one_line(caplog):
    def job():
        raise RuntimeError("RESOURCE_EXHAUSTED: no memory\nwherever")

    background = BackgroundWorker()
    background.submit("program", job)
    background.wait()
    assert "out of memory" in caplog.text and "Traceback" not in caplog.text
