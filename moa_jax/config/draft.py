"""The draft of a round, and sampling settings."""

from __future__ import annotations

import dataclasses
import secrets
from typing import Any

from moa_jax.config.checks import at_least, unboxed
from moa_jax.errors import InputError

MAX_DEPTH = 64  # a chain is unrolled into one program


@dataclasses.dataclass(frozen=True)
class DraftShape:
    """Size of a round's draft; `depth` counts levels with the root, so 1 is plain decoding.

    chain          breadth 1: depth - 1 tokens, one after the other
    dynamic tree   every level keeps its `breadth` likeliest nodes and gives each as many
                   children; the `total_tokens` likeliest of all are verified
    static tree    `paths` says which: (0, 1) is the second child of the root's first;
                   `static` puts them in order and counts the depth
    """

    depth: int
    breadth: int = 1
    total_tokens: int | None = None  # most nodes besides the root; None is all candidates
    paths: tuple[tuple[int, ...], ...] = ()
    sampled: bool = False  # candidates are drawn from the drafter's law, not its likeliest

    def __post_init__(self) -> None:
        at_least(1, self, "depth", "breadth")
        if self.total_tokens is not None:
            at_least(1, self, "total_tokens")
        if self.depth > MAX_DEPTH:
            raise InputError(f"depth is {self.depth}: choose at most {MAX_DEPTH}")
        if self.sampled and self.is_dynamic:
            raise InputError(
                "sampled candidates of a dynamic tree would be chosen by their luck, which "
                "changes the law: use a chain or a static tree, or the likeliest candidates"
            )
        if self.paths:
            self._check_paths()

    @classmethod
    def static(cls, paths: Any, **rest: Any) -> DraftShape:
        """A static tree from its paths, in any order; InputError where they make no tree."""
        try:
            ordered = sorted({tuple(map(int, path)) for path in paths}, key=_level_by_level)
        except (TypeError, ValueError) as error:
            raise InputError(
                "the paths of a tree are lists of child ranks: [[0], [1], [0, 0]]"
            ) from error
        if not ordered or not ordered[0]:
            raise InputError("a tree needs paths of at least one rank each: [[0], [1], [0, 0]]")
        return cls(1 + len(ordered[-1]), paths=tuple(ordered), **rest)

    def _check_paths(self) -> None:
        known = {(), *self.paths}
        for path in self.paths:
            *above, rank = path
            elder = (*above, rank - 1) if rank else ()
            for needed in (tuple(above), elder):
                if needed not in known or rank < 0:
                    raise InputError(
                        f"the tree has the path {list(path)} but not {list(needed)}: give every "
                        "node its parent and its elder siblings"
                    )
        in_order = sorted(known - {()}, key=_level_by_level)
        if list(self.paths) != in_order or self.depth != 1 + len(in_order[-1]):
            raise InputError(
                f"paths {list(map(list, self.paths))} of a tree of depth {self.depth} are not in "
                "order, or of another depth: let `DraftShape.static` make it"
            )

    @property
    def is_dynamic(self) -> bool:
        return self.breadth > 1 and not self.paths

    @property
    def is_chain(self) -> bool:
        """Whether every node has one child at most, so that an accepted path moves no rows."""
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
        """Tokens that one verification takes, the root among them."""
        return 1 + self.num_drafted

    @property
    def levels(self) -> int:
        """The most tokens that one round can commit."""
        return min(self.depth, self.num_nodes)

    @property
    def num_rows(self) -> int:
        """Rows that a round needs in each cache, after those of verified tokens."""
        return max(self.num_nodes, 1 + max(self.depth - 2, 0) * self.breadth)

    @property
    def most_children(self) -> int:
        """The most candidates that one node gets."""
        return 1 + max(map(max, self.paths)) if self.paths else self.breadth

    @property
    def tree_paths(self) -> tuple[tuple[int, ...], ...]:
        """The paths of a static tree; a chain is one whose nodes are first children."""
        return self.paths or tuple((0,) * k for k in range(1, self.levels))


def _level_by_level(path: tuple[int, ...]) -> tuple[Any, ...]:
    """Sort key of a tree's nodes: the order in which drafting makes them."""
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
    top_k: int = 0  # keep the k likeliest tokens; 0 keeps all
    top_p: float = 1.0  # keep the fewest likeliest tokens that hold this much probability
    min_p: float = 0.0  # keep tokens that are at least this likely, relative to the likeliest
    repetition_penalty: float = 1.0  # above 1 makes tokens seen before less likely
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit)
    # These two see the answer alone, and the repetition penalty the prompt as well.
    presence_penalty: float = 0.0  # taken off the logit of each token that the answer has
    frequency_penalty: float = 0.0  # the same, as often as the answer has the token
    seed: int = 0  # below 2**32; -1 draws another one for each call

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, unboxed(getattr(self, field.name)))
        for name, low, high in RANGES:
            value = getattr(self, name)
            if type(value) not in (int, float) or not low <= value <= high:
                raise InputError(f"{name} is {value!r}: choose from {low} to {high}")
        if type(self.top_p) not in (int, float) or not 0 < self.top_p <= 1:
            raise InputError(f"top_p is {self.top_p!r}: choose above 0 and at most 1")
        at_least(0, self, "top_k")
        if type(self.seed) is not int or not -1 <= self.seed < 1 << 32:
            raise InputError(
                f"seed is {self.seed!r}: choose a whole number from 0 to 2**32 - 1, or -1, which "
                "draws one"
            )
        for _, bias in self.logit_bias:
            if not bias < float("inf"):
                raise InputError(f"logit_bias holds {bias}: give numbers below inf, -inf to ban")

    def seeded(self) -> Sampling:
        """These settings, with a seed that is drawn where it is -1."""
        return dataclasses.replace(self, seed=secrets.randbits(31)) if self.seed == -1 else self
