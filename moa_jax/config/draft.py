"""Draft shapes and sampling settings."""

from __future__ import annotations

import dataclasses
import secrets
from typing import Any

from moa_jax.config.checks import at_least, unboxed
from moa_jax.errors import InputError

MAX_DEPTH = 64  # limited because a chain is unrolled into one program


@dataclasses.dataclass(frozen=True)
class DraftShape:
    """Size of a round's draft; `depth` counts the root's level, so 1 is plain decoding.

    chain          breadth 1: depth - 1 tokens, one after the other
    dynamic tree   every level keeps its `breadth` most likely nodes and expands each to
                   `breadth` children; the `total_tokens` most likely candidates are verified
    static tree    `paths` lists the nodes: (0, 1) is the second child of the root's first child;
                   `static` sorts the paths and computes the depth
    """

    depth: int
    breadth: int = 1
    total_tokens: int | None = None  # maximum nodes besides the root; None is all candidates
    paths: tuple[tuple[int, ...], ...] = ()
    sampled: bool = False  # candidates are sampled from the drafter's probs instead of top-k

    def __post_init__(self) -> None:
        at_least(1, self, "depth", "breadth")
        if self.total_tokens is not None:
            at_least(1, self, "total_tokens")
        if self.depth > MAX_DEPTH:
            raise InputError(f"depth is {self.depth}; choose at most {MAX_DEPTH}")
        if self.sampled and self.is_dynamic:
            raise InputError(
                "sampled candidates of a dynamic tree would be chosen by their noise, which "
                "changes the distribution; use a chain or a static tree, or top-k candidates"
            )
        if self.paths:
            self._check_paths()

    @classmethod
    def static(cls, paths: Any, **rest: Any) -> DraftShape:
        """A static tree from its paths, in any order; InputError if they do not form a tree."""
        try:
            ordered = sorted({tuple(map(int, path)) for path in paths}, key=_level_by_level)
        except (TypeError, ValueError) as error:
            raise InputError(
                "the paths of a tree are lists of child ranks; write [[0], [1], [0, 0]]"
            ) from error
        if not ordered or not ordered[0]:
            raise InputError(
                "a tree needs paths of at least one rank each; write [[0], [1], [0, 0]]"
            )
        return cls(1 + len(ordered[-1]), paths=tuple(ordered), **rest)

    def _check_paths(self) -> None:
        known = {(), *self.paths}
        for path in self.paths:
            *above, rank = path
            elder = (*above, rank - 1) if rank else ()
            for needed in (tuple(above), elder):
                if needed not in known or rank < 0:
                    raise InputError(
                        f"the tree has the path {list(path)} but not {list(needed)}; give every "
                        "node its parent and its elder siblings"
                    )
        in_order = sorted(known - {()}, key=_level_by_level)
        if list(self.paths) != in_order or self.depth != 1 + len(in_order[-1]):
            raise InputError(
                f"paths {list(map(list, self.paths))} of a tree of depth {self.depth} are not in "
                "order, or of another depth; let `DraftShape.static` make it"
            )

    @property
    def is_dynamic(self) -> bool:
        return self.breadth > 1 and not self.paths

    @property
    def is_chain(self) -> bool:
        """Whether every node has at most one child, so that an accepted path moves no rows."""
        return self.breadth == 1 and (not self.paths or max(map(max, self.paths)) == 0)

    @property
    def num_drafted(self) -> int:
        """Nodes of one round, not counting the root."""
        if self.paths:
            return len(self.paths)
        if self.depth == 1:
            return 0
        candidates = self.breadth + (self.depth - 2) * self.breadth**2
        return min(self.total_tokens or candidates, candidates)

    @property
    def num_nodes(self) -> int:
        """Tokens of one verification pass, including the root."""
        return 1 + self.num_drafted

    @property
    def levels(self) -> int:
        """Maximum tokens that one round can commit."""
        return min(self.depth, self.num_nodes)

    @property
    def num_rows(self) -> int:
        """Cache rows that a round needs after the rows of verified tokens."""
        return max(self.num_nodes, 1 + max(self.depth - 2, 0) * self.breadth)

    @property
    def most_children(self) -> int:
        """Maximum candidates per node."""
        return 1 + max(map(max, self.paths)) if self.paths else self.breadth

    @property
    def tree_paths(self) -> tuple[tuple[int, ...], ...]:
        """The paths of a static tree; for a chain, every node is a first child."""
        return self.paths or tuple((0,) * k for k in range(1, self.levels))


def _level_by_level(path: tuple[int, ...]) -> tuple[Any, ...]:
    """Sort key of a tree's nodes: the order of drafting."""
    return len(path), path


RANGES = (
    ("temperature", 0.0, 1e6),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", 1e-6, 1e6),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
)


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Sampling settings of one answer; temperature 0 is greedy."""

    temperature: float = 0.0
    top_k: int = 0  # keep the k most likely tokens; 0 keeps all
    top_p: float = 1.0  # keep the smallest set of most likely tokens with this total probability
    min_p: float = 0.0  # keep tokens with at least this probability relative to the most likely
    repetition_penalty: float = 1.0  # values above 1 make earlier tokens less likely
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, value added to its logit)
    # The next two penalties count answer tokens only; the repetition penalty also counts prompts.
    presence_penalty: float = 0.0  # subtracted from the logit of each token in the answer
    frequency_penalty: float = 0.0  # subtracted once per occurrence of the token in the answer
    seed: int = 0  # below 2**32; -1 draws a new seed per call
    min_tokens: int = 0  # tokens of the answer before which no stop id is chosen
    bad_words: tuple[tuple[int, ...], ...] = ()  # sequences of tokens that the answer never has

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, unboxed(getattr(self, field.name)))
        for name, low, high in RANGES:
            value = getattr(self, name)
            if type(value) not in (int, float) or not low <= value <= high:
                raise InputError(f"{name} is {value!r}; choose from {low} to {high}")
        if type(self.top_p) not in (int, float) or not 0 < self.top_p <= 1:
            raise InputError(f"top_p is {self.top_p!r}; choose above 0 and at most 1")
        at_least(0, self, "top_k", "min_tokens")
        if type(self.seed) is not int or not -1 <= self.seed < 1 << 32:
            raise InputError(
                f"seed is {self.seed!r}; choose a whole number from 0 to 2**32 - 1, or -1, which "
                "draws one"
            )
        for _, bias in self.logit_bias:
            if not bias < float("inf"):
                raise InputError(f"logit_bias holds {bias}; give numbers below inf, -inf to ban")

    def seeded(self) -> Sampling:
        """These settings, with a random seed if `seed` is -1."""
        return dataclasses.replace(self, seed=secrets.randbits(31)) if self.seed == -1 else self
