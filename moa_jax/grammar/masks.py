"""Masks of a call: after every node of the drafts, the tokens that the row's grammar allows.

    {"a": 1     root        node      0    1    2    3    4
                /  \\        parent    0    0    1    0    1
               ,    }       paths     0 1 2     3    4
              / \\           mask      after the root and the tokens on the path to the node
             "   }

llguidance fills the masks along a path in one call. A path that branches off is filled after the
tokens that lead to its first node, which are rolled back afterwards. The target cannot choose a
node that the grammar forbids, so the masks after such nodes allow all tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from moa_jax.config import DraftShape
from moa_jax.decode.row_settings import full_bitmask
from moa_jax.drafters.api import NO_TOKEN, Tree, host_tree
from moa_jax.errors import first_line


class Draft(NamedTuple):
    """The nodes that the next call of a row verifies, the root first."""

    shape: DraftShape
    tokens_N: np.ndarray  # NO_TOKEN for absent nodes; the device has the root's token
    parent_N: np.ndarray  # the root is its own parent


@dataclasses.dataclass
class Row:
    """A row of masked calls."""

    matcher: Any | None = None  # an `LLMatcher` after the tokens of the answer; None: no grammar
    draft: Draft | None = None  # None: only the root
    fault: str = ""  # why the row has lost its matcher

    def fail(self, error: BaseException) -> None:
        """Drops the matcher; the next `advance` returns the reason."""
        self.matcher, self.fault = None, first_line(error)

    def advance(self, tokens: Sequence[int]) -> str:
        """Consumes new tokens of the answer; returns why the matcher has failed, or ''."""
        matcher = self.matcher
        # A matcher that allows no more text refuses the stop token as well.
        is_over = matcher is not None and matcher.is_stopped() and not matcher.is_error()
        if matcher is None or is_over or matcher.consume_tokens([*tokens]):
            return self.fault
        return first_line(ValueError(matcher.get_error()))


class Grammar:
    """A compiled grammar."""

    def __init__(self, matcher: Any, vocab_size: int) -> None:
        """`matcher` is an `LLMatcher` before the first token."""
        self._matcher = matcher
        self.bitmask_W = full_bitmask(vocab_size)  # the first tokens that are allowed
        _fill_paths([(matcher, 0, [])], self.bitmask_W[None])

    def row(self) -> Row:
        """The row of a new answer; one thread may call this."""
        return Row(self._matcher.deep_copy())


class Masks(NamedTuple):
    """The masks of a call, and the drafts that they follow."""

    bitmask_BNW: np.ndarray | None = None  # see `RowSettings`
    tree: Tree | None = None


def masks_of(rows: Sequence[Row], shape: DraftShape, vocab_size: int) -> Masks:
    """The masks and the tree of a call; drafts of another shape are dropped."""
    blank_N = np.zeros(shape.num_nodes, np.int32)
    blank = Draft(shape, np.where(blank_N, 0, NO_TOKEN), blank_N)
    drafts = [row.draft if row.draft and row.draft.shape == shape else blank for row in rows]
    tokens_BN = np.array([draft.tokens_N for draft in drafts], np.int32)
    parent_BN = np.array([draft.parent_N for draft in drafts], np.int32)
    bitmask_BNW = full_bitmask(vocab_size, *tokens_BN.shape)
    try:
        fill(bitmask_BNW, [row.matcher for row in rows], tokens_BN, parent_BN)
    except BaseException:  # a panic of llguidance is not an Exception
        for each, row in enumerate(rows):  # one by one, so that the others keep their masks
            one = slice(each, each + 1)
            try:
                fill(bitmask_BNW[one], [row.matcher], tokens_BN[one], parent_BN[one])
            except BaseException as error:
                bitmask_BNW[each] = -1
                row.fail(error)
    return Masks(bitmask_BNW, host_tree(tokens_BN, parent_BN))


def fill(
    bitmask_BNW: np.ndarray,
    matchers: Sequence[Any | None],
    tokens_BN: np.ndarray,
    parent_BN: np.ndarray,
) -> None:
    """Writes the masks after all nodes of the rows that have a matcher."""
    B, N, W = bitmask_BNW.shape
    scratch_XW = full_bitmask(W * 32, B * N)
    paths = {row: paths_of(tokens_BN[row], parent_BN[row]) for row in range(B) if matchers[row]}
    while paths:  # a path of each row at a time, since a matcher follows one path
        jobs = []
        first = {row: paths[row].pop(0) for row in paths}
        with contextlib.ExitStack() as at_the_end:  # also after an exception
            for row, (lead, nodes) in first.items():
                if led := matchers[row].try_consume_tokens(lead):
                    at_the_end.callback(matchers[row].rollback, led)
                if led == len(lead):
                    jobs.append((matchers[row], row * N, tokens_BN[row, nodes[1:]].tolist()))
            scratch_XW[:] = -1
            _fill_paths(jobs, scratch_XW)
        for row, (_, nodes) in first.items():
            bitmask_BNW[row, nodes] = scratch_XW[row * N : row * N + len(nodes)]
        paths = {row: rest for row, rest in paths.items() if rest}


def paths_of(tokens_N: np.ndarray, parent_N: np.ndarray) -> list[tuple[list[int], list[int]]]:
    """The paths that cover the present nodes: the tokens before a path's first mask, and its nodes.

    Those tokens include the token of the path's first node, and exclude the root.
    """
    leads: list[list[int]] = [[]]  # tokens from the root, exclusive, to each node
    found: list[tuple[list[int], list[int]]] = [([], [0])]
    for node in range(1, len(tokens_N)):
        leads.append([*leads[parent_N[node]], int(tokens_N[node])])
        if tokens_N[node] == NO_TOKEN:
            continue
        ends = next((nodes for _, nodes in found if nodes[-1] == parent_N[node]), None)
        if ends is None:
            found.append((leads[node], [node]))
        else:
            ends.append(node)
    return found


@functools.cache
def _executor() -> Any:
    from llguidance import LLExecutor  # only servers have the package

    return LLExecutor()


def _fill_paths(jobs: list[tuple[Any, int, list[int]]], bitmask_XW: np.ndarray) -> None:
    from llguidance import numpy as bitmasks

    if alone := [(matcher, at) for matcher, at, drafts in jobs if not drafts]:
        bitmasks.fill_next_token_bitmask_par(_executor(), alone, bitmask_XW)
    if drafted := [job for job in jobs if job[2]]:
        bitmasks.fill_next_token_bitmask_par_with_draft_tokens(_executor(), drafted, bitmask_XW)
