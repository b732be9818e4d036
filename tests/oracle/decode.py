"""Drafting a chain with caches, and whole rounds: draft, verify, commit (section 3.4).

Between rounds n tokens are verified; the newest committed one, the root, is in no cache.

    memory  |0 1 .. n-1|                     keys and values for CA, of verified tokens only
    SA      |0 1 .. n-1  root  d1 d2 ..|     drafted rows are dropped after the round
    TLI     |0 1 .. n-1 |root  d1 d2 ..|     per reused layer: the target's own rows, then rows
                                             made of the drafter's states in this round
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .blocks import TorchBlock, apply, causal, keys_values, rms_norm
from .moa import TorchDrafter, memory_of, observe


class Rows(NamedTuple):
    """A cache of one block: keys (rotated) and values, in the order of positions."""

    k_BKSE: Tensor
    v_BKSE: Tensor

    @property
    def length(self) -> int:
        return self.k_BKSE.shape[2]

    def append(self, k_BKSE: Tensor, v_BKSE: Tensor) -> Rows:
        return Rows(torch.cat([self.k_BKSE, k_BKSE], 2), torch.cat([self.v_BKSE, v_BKSE], 2))

    def cut(self, length: int) -> Rows:
        return Rows(self.k_BKSE[:, :, :length], self.v_BKSE[:, :, :length])


def no_rows(block: TorchBlock, batch: int) -> Rows:
    num_kv_heads = block.weights["self_attn.k_proj.weight"].shape[0] // block.head_dim
    return Rows(*(torch.zeros(2, batch, num_kv_heads, 0, block.head_dim)))


class Drafting:
    """The drafter's caches for `batch` sequences of one common length."""

    def __init__(self, drafter: TorchDrafter, batch: int = 1) -> None:
        self.drafter = drafter
        self.sa = no_rows(drafter.sa, batch)
        self.memory = no_rows(drafter.ca, batch)
        self.verified = [no_rows(layer, batch) for layer in drafter.reused]
        self.tli = self.verified

    @torch.no_grad()
    def extend(self, key_LBKTE: Tensor, value_LBKTE: Tensor) -> None:
        """Takes the target's keys and values of newly verified tokens, and ends the round.

        The first call has the prompt, a later one the root and the accepted tokens. SA keeps
        what was verified before this call and that round's root; it catches up in `feed`.
        """
        drafter, first = self.drafter, self.memory.length
        self.sa = self.sa.cut(first + 1)
        memory_BTD = memory_of(drafter, key_LBKTE, value_LBKTE).memory_BTD
        batch, count = memory_BTD.shape[:2]
        position_BT = torch.arange(first, first + count).expand(batch, -1)
        self.memory = self.memory.append(*keys_values(drafter.ca, memory_BTD, position_BT))
        last = range(len(key_LBKTE) - len(drafter.reused), len(key_LBKTE))
        own = [(key_LBKTE[i], value_LBKTE[i]) for i in last]
        self.verified = [rows.append(*kv) for rows, kv in zip(self.verified, own, strict=True)]
        self.tli = self.verified

    @torch.no_grad()
    def feed(self, tokens_BT: Tensor) -> Tensor:
        """Reads the tokens that SA has not seen; returns the draft logits after the last, (B, V).

        In a round the first call ends with the root; each further one is the token drafted last.
        """
        drafter, (batch, count) = self.drafter, tokens_BT.shape
        position_BT = torch.arange(self.sa.length, self.sa.length + count).expand(batch, -1)
        x_BTD = drafter.embed_VD[tokens_BT]
        self.sa = self.sa.append(*keys_values(drafter.sa, x_BTD, position_BT))
        x_BTD = apply(drafter.sa, x_BTD, position_BT, *self.sa, causal(count, self.sa.length))

        x_B1D, position_B1 = x_BTD[:, -1:], position_BT[:, -1:]
        x_B1D = apply(drafter.ca, x_B1D, position_B1, *self.memory, causal(1, self.memory.length))
        if drafter.reused:
            x_B1D = self._reuse_target_layers(x_B1D, position_B1)
        return drafter.logits(x_B1D)[:, 0]

    def _reuse_target_layers(self, x_B1D: Tensor, position_B1: Tensor) -> Tensor:
        grown = []
        for layer, rows in zip(self.drafter.reused, self.tli, strict=True):
            rows = rows.append(*keys_values(layer, x_B1D, position_B1))
            x_B1D = apply(layer, x_B1D, position_B1, *rows, causal(1, rows.length))
            grown.append(rows)
        self.tli = grown
        return rms_norm(x_B1D, self.drafter.final_norm_D, self.drafter.sa.eps)


class Round(NamedTuple):
    """One verification: `drafted` follows `root`; `matched` of it agree with the target.

    `kept` is `matched` cut where a stop id or the limit on new tokens ends the output.
    """

    context: int  # verified tokens before the round
    root: int
    drafted: list[int]
    matched: int
    kept: int


class DecodedText(NamedTuple):
    """Prompt and output together, stop id kept."""

    tokens: list[int]
    rounds: list[Round]


def ended(new: Sequence[int], limit: int, stop: Collection[int]) -> bool:
    return len(new) >= limit or (len(new) > 0 and new[-1] in stop)


@torch.no_grad()
def greedy(model: Any, prompt: Sequence[int], limit: int, stop: Collection[int] = ()) -> list[int]:
    """Plain decoding without a cache: the prompt and at most `limit` new tokens."""
    tokens = list(prompt)
    while not ended(tokens[len(prompt) :], limit, stop):
        tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens


def decode_chain(
    drafter: TorchDrafter,
    model: Any,
    prompt: Sequence[int],
    num_drafted: int,
    limit: int,
    stop: Collection[int] = (),
) -> DecodedText:
    """Greedy rounds that draft `num_drafted` tokens; the target runs from scratch each time.

    A round commits the root, known before it, and the drafted tokens up to the first one that
    is not the target's own choice. That choice is the next round's root, or the end.
    """
    drafting, tokens, rounds = Drafting(drafter), list(prompt), []
    seen = observe(model, torch.tensor([tokens]))
    choices = drafter.logits(seen.hidden_LBTD[-1])[0].argmax(-1).tolist()
    context = len(tokens)
    while True:
        tokens.append(choices[context - 1])
        if ended(tokens[len(prompt) :], limit, stop):
            return DecodedText(tokens, rounds)
        fresh = slice(drafting.memory.length, context)
        drafting.extend(seen.key_LBKTE[:, :, :, fresh], seen.value_LBKTE[:, :, :, fresh])
        drafted = draft_chain(drafting, tokens, num_drafted)

        seen = observe(model, torch.tensor([tokens + drafted]))
        choices = drafter.logits(seen.hidden_LBTD[-1])[0].argmax(-1).tolist()
        matched = agreeing(drafted, choices[context:])
        kept = 0
        while kept < matched and not ended(tokens[len(prompt) :], limit, stop):
            tokens.append(drafted[kept])
            kept += 1
        rounds.append(Round(context, tokens[context], drafted, matched, kept))
        if ended(tokens[len(prompt) :], limit, stop):
            return DecodedText(tokens, rounds)
        context += 1 + kept


def draft_chain(drafting: Drafting, tokens: Sequence[int], count: int) -> list[int]:
    """The drafter's own greedy continuation of `tokens`, whose last is the root."""
    drafted: list[int] = []
    fresh = list(tokens[drafting.sa.length :])
    while len(drafted) < count:
        drafted.append(int(drafting.feed(torch.tensor([fresh])).argmax()))
        fresh = drafted[-1:]
    return drafted


def agreeing(drafted: Sequence[int], choices: Sequence[int]) -> int:
    """How many drafted tokens, from the first on, the target would have chosen too."""
    same = [a == b for a, b in zip(drafted, choices, strict=False)]
    return (same + [False]).index(False)
