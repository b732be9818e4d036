"""One-line breaks of decoding and serving, each of which a named selection of tests must catch.

    python -m tests.mutations             all breaks, in order
    python -m tests.mutations 3 17        these breaks, by their numbers
    python -m tests.mutations --list      numbers and sentences alone

Each selection runs once unbroken, so that a selection that fails or collects nothing catches
nothing. Breaks are applied one at a time to a copy of the tracked files of the working tree. Prints
one line per break and exits with 1 unless all are caught.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 300  # per selection; a break that makes tests hang is caught
FAILED, HANGS = 1, -1  # pytest's exit status for failed tests, and that of a run out of time


class Mutation(NamedTuple):
    """A break of one behaviour."""

    what: str  # the broken behaviour
    path: str  # of the file
    old: str  # occurs once in the file
    new: str
    tests: str  # arguments of pytest


DECODE = "moa_jax/decode"
ENGINE = "moa_jax/engine"
TEST = "tests/decode"
TEST_ENGINE = "tests/engine"
SPECULATION = "moa_jax/speculation"
TEST_SPECULATION = "tests/speculation"

OF_DECODE = [
    Mutation(
        "The bonus token after accepted drafts is dropped.",
        f"{DECODE}/verify.py",
        "count_B = jnp.sum(accepted_BN, axis=1, dtype=jnp.int32)",
        "count_B = jnp.maximum(jnp.sum(accepted_BN, axis=1, dtype=jnp.int32) - 1, 1)",
        f"{TEST}/test_spec.py -k test_verify_",
    ),
    Mutation(
        "A node is accepted although its parent is rejected.",
        f"{DECODE}/verify.py",
        "accepted_BN = jnp.all(match_BN[:, None, :] | ~tree.ancestor_BNN, axis=-1)",
        "accepted_BN = match_BN",
        f"{TEST}/test_spec.py -k test_verify_",
    ),
    Mutation(
        "An answer exceeds max_tokens by one token.",
        f"{DECODE}/step.py",
        "room_B = limits.total_B - round_state.length_B - 1",
        "room_B = limits.total_B - round_state.length_B",
        f"{TEST}/test_spec.py -k test_numbers_of_numpy",
    ),
    Mutation(
        "An answer goes on for one token after a stop token.",
        f"{DECODE}/step.py",
        "jnp.minimum(first_stop_B + 1, room_B)",
        "jnp.minimum(first_stop_B + 2, room_B)",
        f"{TEST}/test_spec.py::test_every_stop_position[llama-n0]",
    ),
    Mutation(
        "A finished row of a batch emits more tokens.",
        f"{DECODE}/step.py",
        "count_B = jnp.where(round_state.done_B, 0, count_B)",
        "count_B = jnp.where(False, 0, count_B)",
        f"{TEST}/test_spec.py -k test_a_row_that_has_stopped",
    ),
    Mutation(
        "An answer begins although a logit is not finite.",
        f"{DECODE}/step.py",
        "jnp.where(is_finite_B, finite_argmax(score_B1V[:, 0]), NO_TOKEN)",
        "finite_argmax(score_B1V[:, 0])",
        f"{TEST}/test_spec.py -k test_an_answer_does_not_begin",
    ),
    Mutation(
        "The cache keeps the rows of rejected nodes of a tree.",
        f"{DECODE}/step.py",
        "caches = keep_path(found.caches, taken, path_BD, round_state.length_B)",
        "caches = found.caches",
        f"{TEST}/test_trees.py::test_draft_rounds_equal_recorded[moa_llama_trained-d4b3t8]",
    ),
    Mutation(
        "The drafter is extended with the first nodes of the tree instead of the accepted path.",
        f"{DECODE}/step.py",
        "tokens_BD = jnp.take_along_axis(tree.tokens_BN, found.result.path_BD, axis=1)",
        "tokens_BD = tree.tokens_BN[:, : found.result.path_BD.shape[1]]",
        f"{TEST}/test_trees.py::test_draft_rounds_equal_recorded[moa_llama_trained-d4b3t8]",
    ),
    Mutation(
        "The first token of an answer does not count for penalties.",
        f"{DECODE}/step.py",
        "sampling.add_answer_tokens(round_state.token_counts, root_B[:, None])",
        "round_state.token_counts",
        f"{TEST}/test_chunks.py -k test_a_penalty_sees",
    ),
    Mutation(
        "The root of a draft counts twice for penalties.",
        f"{DECODE}/step.py",
        "sampling.along_paths(token_counts, above_BNN[..., 1:])",
        "sampling.along_paths(token_counts, above_BNN)",
        f"{TEST}/test_sampling_texts.py -m 'not slow' -k 'test_penalties_of_answers_equal'",
    ),
    Mutation(
        "The second token of an answer reuses the noise of the first.",
        f"{DECODE}/step.py",
        "position_BD = round_state.length_B[:, None] + 1 + jnp.arange(setup.shape.levels)",
        "position_BD = round_state.length_B[:, None] + jnp.arange(setup.shape.levels)",
        f"{TEST}/test_sampling_texts.py -k test_texts_go_on",
    ),
    Mutation(
        "Sampled drafts and the target share one stream of noise.",
        f"{DECODE}/step.py",
        "sampling.gumbel(batch_sampling, sampling.DRAFT, position_B1, size)",
        "sampling.gumbel(batch_sampling, sampling.TARGET, position_B1, size)",
        f"{TEST}/test_sampling_texts.py::test_texts_have_the_law_of_the_target[chain]",
    ),
    Mutation(
        "Log-probabilities are stored one token late.",
        f"{DECODE}/step.py",
        "logprobs=rows and logprobs.placed(rows, found.logprobs, start_B)",
        "logprobs=rows and logprobs.placed(rows, found.logprobs, start_B + 1)",
        f"{TEST}/test_logprobs.py::test_they_are_those_of_one_pass_over_the_text[None]",
    ),
    Mutation(
        "A drafter that lags counts as synchronized after one drafted round.",
        f"{DECODE}/step.py",
        "known_B = jnp.where(is_late_B, lag.draft_len_B, state.round.length_B)",
        "known_B = state.round.length_B",
        f"{TEST}/test_switching.py -k test_a_drafted_round_of",
    ),
    Mutation(
        "A drafter that lags by one token is not synchronized.",
        f"{DECODE}/step.py",
        "(round_state.length_B - known_B >= enough)",
        "(round_state.length_B - known_B > enough)",
        f"{TEST}/test_switching.py -k test_the_drafter_reads_the_last",
    ),
    Mutation(
        "A residual distribution is not normalized.",
        f"{DECODE}/sampling.py",
        "jnp.where(drawn_BN1, _normalised(left_BNV, probs_BNV), probs_BNV)",
        "jnp.where(drawn_BN1, left_BNV, probs_BNV)",
        f"{TEST}/test_sampling_outcomes.py -k test_sampled_candidates",
    ),
    Mutation(
        "The drafter's distribution keeps a rejected token.",
        f"{DECODE}/sampling.py",
        "others_BNV = jnp.where(tokens_V == token_BN1, 0.0, draft_BNV)",
        "others_BNV = draft_BNV",
        f"{TEST}/test_sampling_outcomes.py -k test_sampled_candidates",
    ),
    Mutation(
        "Presence and frequency penalties count the prompt.",
        f"{DECODE}/sampling.py",
        "answer_BC = jnp.where(is_prompt_BC, NO_TOKEN, tokens_BC)",
        "answer_BC = tokens_BC",
        f"{TEST}/test_sampling.py -k test_what_was_said",
    ),
    Mutation(
        "Top-k and top-p keep one token too many.",
        f"{DECODE}/sampling.py",
        "less_BNT = weight_BNTX.sum(axis=-1) < enough_BN1",
        "less_BNT = weight_BNTX.sum(axis=-1) <= enough_BN1",
        f"{TEST}/test_sampling.py -k 'test_what_is_kept and not 128256'",
    ),
    Mutation(
        "Top-p refers to all tokens instead of those that top-k keeps.",
        f"{DECODE}/sampling.py",
        "p_B11 * total_BN1) | (p_B11 >= 1)",
        "p_B11) | (p_B11 >= 1)",
        f"{TEST}/test_sampling.py -k test_law_equals",
    ),
    Mutation(
        "Min-p is a probability instead of a share of the largest one.",
        f"{DECODE}/sampling.py",
        "log_BNV >= best_BN1 + jnp.log(",
        "log_BNV >= 0 * best_BN1 + jnp.log(",
        f"{TEST}/test_sampling.py -k test_law_equals",
    ),
    Mutation(
        "All rows of a batch share the seed of the first.",
        f"{DECODE}/sampling.py",
        "[(0, row.seed) for row in rows]",
        "[(0, rows[0].seed) for row in rows]",
        f"{TEST}/test_sampling_texts.py -k test_seeds_decide",
    ),
    Mutation(
        "The beginning of a stop string is shown before the string is complete.",
        f"{DECODE}/detokenize.py",
        "return max(ends, default=0)",
        "return 0",
        f"{TEST}/test_detokenize.py -k test_what_may_become",
    ),
    Mutation(
        "The last of several stop strings ends an answer.",
        f"{DECODE}/detokenize.py",
        "place, self.stop = min(found)",
        "place, self.stop = max(found)",
        f"{TEST}/test_detokenize.py -k test_the_first_of_two_stop",
    ),
    Mutation(
        "A stop string that `stop_when` finds is reported as the length limit.",
        f"{DECODE}/generation.py",
        "stopped = row in self._kept or tokens[-1] in stop_X.tolist()",
        "stopped = tokens[-1] in stop_X.tolist()",
        f"{TEST}/test_spec.py -k test_a_text_that_ends_with_its_first",
    ),
    Mutation(
        "A cache is taken to hold one token more than its rows.",
        f"{DECODE}/limits.py",
        "room = min(room, self.cache_rows - self.draft_rows)",
        "room = min(room, self.cache_rows - self.draft_rows + 1)",
        f"{TEST}/test_limits.py",
    ),
]

OF_THE_ENGINE = [
    Mutation(
        "A cancelled request keeps its slot.",
        f"{ENGINE}/engine.py",
        "finish(state)\n        self._totals.finished",
        "finish(state) if output != CANCELLED else 0\n        self._totals.finished",
        f"{TEST_ENGINE}/test_ends.py::test_a_request_may_be_cancelled_at_any_time",
    ),
    Mutation(
        "The queue takes one request too many.",
        f"{ENGINE}/engine.py",
        "if room <= others:",
        "if room < others:",
        f"{TEST_ENGINE}/test_ends.py -k test_a_full_queue",
    ),
    Mutation(
        "A request of exactly max_tokens is refused.",
        f"{ENGINE}/engine.py",
        "if total > self.max_tokens:",
        "if total >= self.max_tokens:",
        f"{TEST_ENGINE}/test_ends.py -k test_what_cannot_be_answered",
    ),
    Mutation(
        "An engine is healthy after any number of failed steps.",
        f"{ENGINE}/engine.py",
        "return runs and self._failures_in_a_row < MAX_FAILURES",
        "return runs",
        f"{TEST_ENGINE}/test_ends.py -k test_three_failed_steps",
    ),
    Mutation(
        "An engine whose thread has ended is healthy.",
        f"{ENGINE}/engine.py",
        "return runs and self._failures_in_a_row < MAX_FAILURES",
        "return self._failures_in_a_row < MAX_FAILURES",
        f"{TEST_ENGINE}/test_ends.py -k test_an_engine_without_its_thread",
    ),
    Mutation(
        "A drain gives running requests no time.",
        f"{ENGINE}/engine.py",
        "time.monotonic() + drain_s)",
        "time.monotonic())",
        f"{TEST_ENGINE}/test_ends.py::test_closing_lets_answers_end_in_the_time_they_have",
    ),
    Mutation(
        "An answer that ends with a stop token ends by its length.",
        f"{ENGINE}/engine.py",
        'finish_reason="stop" if stopped else "length"',
        'finish_reason="length"',
        f"{TEST_ENGINE}/test_engine.py -m 'not slow' -k test_texts_are_those_of_plain",
    ),
    Mutation(
        "A slot keeps the last token of an answer, which no cache holds.",
        f"{ENGINE}/requests.py",
        "tokens + self.answer[:-1]",
        "tokens + self.answer",
        f"{TEST_ENGINE}/test_engine.py -k 'test_prompts_that_begin_alike and lookup'",
    ),
    Mutation(
        "The counter of generated tokens counts outputs instead of tokens.",
        f"{ENGINE}/engine.py",
        'self._totals.counts["generated_tokens"] += len(output.token_ids)',
        'self._totals.counts["generated_tokens"] += bool(output.token_ids)',
        f"{TEST_ENGINE}/test_engine.py -k test_counters_have",
    ),
    Mutation(
        "A drafted call begins before a lagging drafter has caught up.",
        f"{ENGINE}/engine.py",
        "self._batch.catch_up(state)",
        "pass",
        f"{TEST_ENGINE}/test_engine.py -k 'test_drafts_are_as_good and moa-2'",
    ),
    Mutation(
        "A round that a stop or the limit truncates counts as rejection.",
        f"{ENGINE}/pacing.py",
        "output.rounds[: len(output.rounds) - output.is_done]",
        "output.rounds",
        f"{TEST_ENGINE}/test_engine.py -k test_rounds_that_are_cut",
    ),
    Mutation(
        "The counter of accepted tokens includes the bonus token.",
        f"{ENGINE}/stats.py",
        "for position in range(committed - 1):",
        "for position in range(min(committed, len(self._accepted))):",
        f"{TEST_ENGINE}/test_engine.py -k test_counters_have",
    ),
    Mutation(
        "A cached prefix is taken to be one token longer than the common part.",
        f"{ENGINE}/prefix_cache.py",
        "return int(differ[0]) if len(differ) else size",
        "return int(differ[0]) + 1 if len(differ) else size",
        f"{TEST_ENGINE}/test_scheduler.py",
    ),
    Mutation(
        "A new request takes the slot that was used last.",
        f"{ENGINE}/prefix_cache.py",
        "target, num_cached = self.free()[0], common[source]",
        "target, num_cached = self.free()[-1], common[source]",
        f"{TEST_ENGINE}/test_scheduler.py",
    ),
    Mutation(
        "A cached prefix may be the whole prompt, so that nothing is left to prefill.",
        f"{ENGINE}/prefix_cache.py",
        "prompt[:-1] if may_reuse",
        "prompt if may_reuse",
        f"{TEST_ENGINE}/test_scheduler.py -k test_the_last_token",
    ),
    Mutation(
        "The slot of a running request is given to another one.",
        f"{ENGINE}/prefix_cache.py",
        "if not kept.in_use and num_cached",
        "if num_cached",
        f"{TEST_ENGINE}/test_scheduler.py",
    ),
    Mutation(
        "Log-probabilities of a prompt are those of the token before.",
        f"{ENGINE}/batch.py",
        "(begin, begin + 1), strict=True",
        "(begin, begin), strict=True",
        f"{TEST_ENGINE}/test_prompt_logprobs.py -k 'test_they_are_those_of_one_pass and not moa'",
    ),
    Mutation(
        "A reused prefix is taken to be in the drafter's cache.",
        f"{ENGINE}/device_ops.py",
        "known = jnp.minimum(lag.draft_len_B[target], length)",
        "known = length",
        f"{TEST_ENGINE}/test_engine.py -k 'test_a_copied_prefix and moa-2'",
    ),
    Mutation(
        "A batch is decoded with the settings that the plainest request needs.",
        f"{ENGINE}/program_cache.py",
        "LOGPROBS if any(with_logprobs) else SAMPLED if any(sampled) else GREEDY",
        "LOGPROBS if any(with_logprobs) else SAMPLED if all(sampled) else GREEDY",
        f"{TEST_ENGINE}/test_engine.py -k test_a_call_serves_the_settings",
    ),
    Mutation(
        "A new request is decoded with the settings of the row's last request.",
        f"{ENGINE}/batch.py",
        "tuple((row, state.id) for row, state in states.items())",
        "tuple(states)",
        f"{TEST_ENGINE}/test_engine.py -m 'not slow' -k test_texts_are_those_of_plain",
    ),
    Mutation(
        "Padding rows of a call decode.",
        f"{ENGINE}/batch.py",
        "live_B[rows] = True",
        "live_B[:] = True",
        f"{TEST_ENGINE}/test_engine.py -k 'test_padding_rows'",
    ),
    Mutation(
        "A long prompt is read to its end before anybody decodes.",
        f"{ENGINE}/scheduler.py",
        "while budget > 0 and (state := self._next_prompt()):",
        "while state := self._next_prompt():",
        f"{TEST_ENGINE}/test_scheduler.py",
    ),
    Mutation(
        "A request whose step failed keeps the lost state of the others.",
        f"{ENGINE}/engine.py",
        "lost = [*lost, *self._scheduler.running]",
        "pass",
        f"{TEST_ENGINE}/test_ends.py -k test_who_runs_is_lost",
    ),
    Mutation(
        "The other processes miss a message.",
        f"{ENGINE}/multihost.py",
        "self._followers.broadcast(RunMessage(number, name, sent, dead))",
        'name[0] == "copy" or self._followers.broadcast(RunMessage(number, name, sent, dead))',
        f"{TEST_ENGINE}/test_multihost.py -k 'test_another_process and not moa'",
    ),
    Mutation(
        "A program that fails leaves the other processes waiting.",
        f"{ENGINE}/multihost.py",
        'self._followers.end(f"{type(error).__name__}: {first_line(error)}")',
        "pass",
        f"{TEST_ENGINE}/test_multihost.py -k test_a_run_that_fails",
    ),
]

OF_CHOICE = [
    Mutation(
        "The cost table gives the costs of every batch size.",
        f"{SPECULATION}/cost_table.py",
        "for size, shape in list(self._ms) if size == batch]",
        "for size, shape in list(self._ms)]",
        f"{TEST_SPECULATION}/test_cost_table.py",
    ),
    Mutation(
        "The cost table of another pair, device or version is used.",
        f"{SPECULATION}/cost_table.py",
        'if content["key"] != key._asdict():',
        "if False:",
        f"{TEST_SPECULATION}/test_cost_table.py",
    ),
    Mutation(
        "The acceptance rate is that of the last call alone.",
        f"{SPECULATION}/acceptance.py",
        "rate = (rate * count + hits) / (count + reached)",
        "rate = hits / reached",
        f"{TEST_SPECULATION}/test_acceptance.py",
    ),
    Mutation(
        "A draft position counts rounds that rejected an earlier position.",
        f"{SPECULATION}/acceptance.py",
        "reached = hits\n",
        "pass\n",
        f"{TEST_SPECULATION}/test_acceptance.py",
    ),
    Mutation(
        "Drafts of which none is accepted never become rare.",
        f"{SPECULATION}/controller.py",
        "LIMIT * plain_ms - self.debt_ms - lag_ms",
        "LIMIT * plain_ms - lag_ms",
        f"{TEST_SPECULATION}/test_controller.py -k 'rare or bounded'",
    ),
    Mutation(
        "The time in which a lagging drafter catches up is not a debt.",
        f"{SPECULATION}/controller.py",
        "self.debt_ms += lag_ms\n",
        "pass\n",
        f"{TEST_SPECULATION}/test_controller.py -k catch_up",
    ),
    Mutation(
        "A call beside a prompt or a compiler corrects costs.",
        f"{ENGINE}/pacing.py",
        "if call.is_clean:",
        "if True:",
        f"{TEST_ENGINE}/test_engine.py -k test_only_calls_that_ran_alone",
    ),
    Mutation(
        "A short prompt waits until all older prompts are prefilled.",
        "infer/split_server/pass_scheduler.py",
        "return shortest if self._oldest_is_next else oldest",
        "return oldest",
        "tests/split/test_pass_scheduler.py",
    ),
    Mutation(
        "A failure that loses the batch state ends only the requests of the failing step.",
        "infer/split_server/pass_scheduler.py",
        "lost = [*self._at_work, *(self._has_state() if state_is_lost else ())]",
        "lost = [*self._at_work]",
        "tests/split/test_pass_scheduler.py",
    ),
]

OPENAI = "infer/openai"
OF_THE_OPENAI_SERVER = [
    Mutation(
        "/health says ok while the engine is dead.",
        f"{OPENAI}/app.py",
        '"ok" if self.engine.healthy else "failing"',
        '"ok"',
        "tests/serve/test_protocol_errors.py -k test_health",
    ),
    Mutation(
        "A client that leaves does not cancel its request.",
        f"{OPENAI}/app.py",
        "answering.cancel()",
        "pass",
        "tests/serve/test_protocol_errors.py -k test_a_client_that_leaves",
    ),
    Mutation(
        "A drain ends running requests at once.",
        f"{OPENAI}/app.py",
        "while self.answering and time.monotonic() < end:",
        "while False:",
        "tests/serve/test_protocol_errors.py -k test_a_drain_lets",
    ),
    Mutation(
        "Status 429 comes without Retry-After.",
        f"{OPENAI}/streams.py",
        "raise APIError(TOO_MANY, str(error), code=code, headers=wait) from error",
        "raise APIError(TOO_MANY, str(error), code=code) from error",
        "tests/serve/test_protocol_errors.py -k test_a_full_queue",
    ),
    Mutation(
        "The choices of a request share one seed.",
        f"{OPENAI}/streams.py",
        "sampling=row_of(request.sampling, choice.index)",
        "sampling=request.sampling",
        "tests/serve/test_protocol.py -k test_choices_have_seeds",
    ),
    Mutation(
        "The text that was held back for a stop string is lost at the end of an answer.",
        f"{OPENAI}/streams.py",
        "self._delta.text += self._text.end()",
        "pass",
        "tests/serve/test_protocol.py -k test_the_beginning_of_a_stop",
    ),
    Mutation(
        "The last piece of a stream is lost if it comes while the piece before is sent.",
        f"{OPENAI}/streams.py",
        "            if done:\n",
        "            if self.done:\n",
        "tests/serve/test_protocol_errors.py -k test_a_slow_reader",
    ),
    Mutation(
        "A stop string leaves its request in the engine.",
        f"{OPENAI}/streams.py",
        "self._stream.engine.cancel(self.handle)  #",
        "pass  #",
        "tests/serve/test_protocol.py -k test_a_stop_text_ends",
    ),
    Mutation(
        "The usage counts a prompt once per choice.",
        f"{OPENAI}/streams.py",
        "return sum(len(prompt.ids) for prompt in self.request.prompts)",
        "return sum(len(choice._echoed.ids) for choice in self.choices)",
        "tests/serve/test_protocol.py -k test_choices_have_seeds",
    ),
    Mutation(
        "A request that fills the context exactly is refused.",
        f"{OPENAI}/requests.py",
        "if (asked or 0) > min(fits):",
        "if (asked or 0) >= min(fits):",
        "tests/serve/test_requests.py -k test_limits_on_tokens",
    ),
    Mutation(
        "The metric of accepted drafts has the number of drafted tokens.",
        f"{OPENAI}/metrics.py",
        '("Drafts accepted", stats.accepted_tokens)',
        '("Drafts accepted", stats.drafted_tokens)',
        "tests/serve/test_protocol.py -k test_metrics_have_the_figures",
    ),
]

SERVER, CLIENT = "infer/split_server", "infer/split_client"
OF_SPLIT_DECODING = [
    Mutation(
        "A repeated request is decoded again.",
        f"{SERVER}/service.py",
        "if request.seq == session.reply.seq:",
        "if False:",
        "tests/split/test_split_service.py -k test_split_requests_come_one_at_a_time",
    ),
    Mutation(
        "The split server is healthy after any number of failures.",
        f"{SERVER}/service.py",
        "return self._failures < MOST_FAILURES and not",
        "return not",
        "tests/split/test_split_service.py -k test_split_failures_end",
    ),
    Mutation(
        "The metric of accepted drafts includes the bonus token.",
        f"{SERVER}/service.py",
        "drafted, accepted = len(draft.tokens), max(result.count - 1, 0)",
        "drafted, accepted = len(draft.tokens), max(result.count, 0)",
        "tests/split/test_split_server.py -k test_split_metrics",
    ),
    Mutation(
        "A slot that is assigned to a client that has left is lost.",
        f"{SERVER}/sessions.py",
        "self.give_back()  #",
        "pass  #",
        "tests/split/test_split_service.py -k test_split_slot_is_waited_for",
    ),
    Mutation(
        "The queue for slots holds one client too many.",
        f"{SERVER}/sessions.py",
        "if len(self._queue) >= self._limits.max_queue:",
        "if len(self._queue) > self._limits.max_queue:",
        "tests/split/test_split_service.py -k test_split_queue_has_an_end",
    ),
    Mutation(
        "A stream that starts again after a lost link repeats tokens.",
        f"{CLIENT}/replies.py",
        "new = part.tokens[max(have, 0) :]",
        "new = part.tokens",
        "tests/split/test_disconnect_replies.py -k test_disconnect_stream_goes_on",
    ),
    Mutation(
        "The rejected position of a draft does not lower its acceptance rate.",
        f"{CLIENT}/pace.py",
        "_chain(min(drafted, self.lengths[-1])), [accepted], 1)",
        "_chain(min(drafted, accepted, self.lengths[-1])), [accepted], 1)",
        "tests/split/test_pace.py",
    ),
    Mutation(
        "The padding rows of a pass overwrite the first slot.",
        "moa_jax/split/server_target.py",
        "slot_A = np.full(A, self._scratch, np.int32)",
        "slot_A = np.full(A, 0, np.int32)",
        "tests/split/test_split.py::test_split_sessions_share_a_pass_without_touching_each_other[n1]",
    ),
]

MUTATIONS = [*OF_DECODE, *OF_THE_ENGINE, *OF_CHOICE, *OF_THE_OPENAI_SERVER, *OF_SPLIT_DECODING]


# ---- the runner ---------------------------------------------------------------------------


def copy_tree(folder: Path) -> Path:
    """Copies the tracked files of the working tree, next to a link to the recorded data."""
    tree, listed = folder / "tree", ["git", "-C", str(ROOT), "ls-files", "-z"]
    names = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    (folder / "shared").symlink_to(ROOT.parent / "shared")
    return tree


def run_python(tree: Path, *arguments: str) -> int:
    """Returns the exit status of Python in the copied tree, or HANGS."""
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(ROOT / ".jax_cache")
    own = {"JAX_COMPILATION_CACHE_DIR": cache, "PYTHONDONTWRITEBYTECODE": "1"}
    command, quiet = [sys.executable, *arguments], subprocess.DEVNULL
    with subprocess.Popen(command, cwd=tree, env=os.environ | own, stdout=quiet, stderr=quiet) as p:
        try:
            return p.wait(SECONDS)
        except subprocess.TimeoutExpired:
            p.kill()
            return HANGS


def run_tests(tree: Path, tests: str) -> int:
    """Returns the exit status of pytest for a selection; slow tests may be selected."""
    options = ["-x", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-m", "not hub"]
    return run_python(tree, "-m", "pytest", *options, *shlex.split(tests))


def outcome(tree: Path, mutation: Mutation) -> str:
    """Applies a break, runs its selection and undoes the break."""
    path, module = tree / mutation.path, mutation.path.removesuffix(".py").replace("/", ".")
    source = path.read_text("utf-8")
    if source.count(mutation.old) != 1:
        return "does not apply"
    path.write_text(source.replace(mutation.old, mutation.new), "utf-8")
    try:
        if run_python(tree, "-c", f"import {module}"):
            return "does not apply: the module cannot be imported"
        status = run_tests(tree, mutation.tests)
    finally:
        path.write_text(source, "utf-8")
    if status in (FAILED, HANGS):
        return "caught"
    return "SURVIVED" if status == 0 else f"does not apply: pytest exits with {status}"


def main(arguments: list[str]) -> int:
    numbered = list(enumerate(MUTATIONS, 1))
    if arguments == ["--list"]:
        print(*(f"{number:3} {mutation.what}" for number, mutation in numbered), sep="\n")
        return 0
    chosen = [each for each in numbered if not arguments or str(each[0]) in arguments]
    caught = 0
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        tree, unbroken = copy_tree(Path(folder)), {}
        for number, mutation in chosen:
            if mutation.tests not in unbroken:
                unbroken[mutation.tests] = run_tests(tree, mutation.tests)
            if status := unbroken[mutation.tests]:
                found = f"does not apply: unbroken, pytest exits with {status}"
            else:
                found = outcome(tree, mutation)
            caught += found == "caught"
            print(f"{number:3} {found}: {mutation.what}", flush=True)
    print(f"{caught} of {len(chosen)} breaks are caught")
    return int(caught < len(chosen))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
