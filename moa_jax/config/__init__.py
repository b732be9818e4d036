"""Every static choice, as frozen dataclasses: shapes of models, of drafting, of training.

Field names are the field's own (those of Hugging Face configs and of the paper's
code). Numbers that change a model's output have no defaults.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from moa_jax.errors import InputError

Family = Literal["llama", "qwen2", "qwen3"]
MAX_DEPTH = 64  # a chain is unrolled into one program


def _at_least(low: int, config: Any, *names: str) -> None:
    """Raise InputError for the first of these fields that is no whole number from `low` on."""
    for name in names:
        value = getattr(config, name)
        if type(value) is not int or value < low:
            raise InputError(f"{name} is {value!r}: choose a whole number of at least {low}")


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Frequency scaling of rotary embeddings: `linear`, or `llama3` as Llama 3.1 defined it."""

    rope_type: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """One pre-norm decoder layer: attention and SwiGLU, each with its residual."""

    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm on each query and key head before RoPE (Qwen3)

    def __post_init__(self) -> None:
        counts = ("hidden_size", "num_heads", "num_kv_heads", "head_dim", "intermediate_size")
        _at_least(1, self, *counts)
        if self.num_heads % self.num_kv_heads:
            raise InputError(
                f"{self.num_heads} attention heads do not share {self.num_kv_heads} key-value "
                "heads evenly: choose a number of key-value heads that divides the heads"
            )
        if self.head_dim % 2:
            raise InputError(
                f"head size {self.head_dim} is odd, and rotary embeddings turn pairs: "
                "choose head counts that give an even head size"
            )

    @property
    def group_size(self) -> int:
        """Query heads that share one key-value head."""
        return self.num_heads // self.num_kv_heads


@dataclasses.dataclass(frozen=True)
class TargetConfig:
    """A frozen causal LM of the Llama family: `num_layers` equal blocks."""

    family: Family
    vocab_size: int
    num_layers: int
    block: BlockConfig
    tie_word_embeddings: bool
    max_position_embeddings: int

    def __post_init__(self) -> None:
        _at_least(1, self, "vocab_size", "num_layers", "max_position_embeddings")

    @property
    def memory_width(self) -> int:
        """M, the width of one layer's flattened keys and values for one token."""
        return 2 * self.block.num_kv_heads * self.block.head_dim


@dataclasses.dataclass(frozen=True)
class MoaConfig:
    """Sizes of a Mixture-of-Attentions drafter; the keys of its file have the same names."""

    self_attention_num_key_value_heads: int
    self_attention_intermediate_size: int
    cross_attention_num_key_value_heads: int
    cross_attention_intermediate_size: int
    layer_self_attention_num_key_value_heads: int
    layer_self_attention_intermediate_size: int
    target_layer_inference: int = 0  # the paper's N: target layers reused after CA
    # What one memory vector is made of: layer self-attention over the keys and values of all
    # layers, or, as ablations, their mean, or the last layer's alone.
    layer_mixing: Literal["attention", "mean", "last"] = "attention"
    has_self_attention: bool = True  # without it embeddings go to cross-attention (an ablation)

    def __post_init__(self) -> None:
        names = (field.name for field in dataclasses.fields(self))
        _at_least(1, self, *(name for name in names if name.endswith(("_heads", "_size"))))
        _at_least(0, self, "target_layer_inference")


@dataclasses.dataclass(frozen=True)
class EagleConfig:
    """An EAGLE-1 or EAGLE-2 drafter: one decoder layer over token and feature.

    The official one has no norm at the layer's input and a bias in `fc`; the one of the paper's
    code is the other way round. Names say whose files it writes.
    """

    num_key_value_heads: int
    intermediate_size: int
    block: BlockConfig | None = None  # its layer, where heads or RoPE are not the target's
    input_norm: bool = False
    fc_bias: bool = True
    names: Literal["official", "authors"] = "official"
    # The paper's code shifts the drafter's tree mask by one column; True decodes like that.
    shifted_mask: bool = False

    def __post_init__(self) -> None:
        _at_least(1, self, "num_key_value_heads", "intermediate_size")


@dataclasses.dataclass(frozen=True)
class Eagle3Config:
    """An EAGLE-3 drafter: three tapped layers fused, one wider layer, a head of its own."""

    num_key_value_heads: int
    intermediate_size: int
    block: BlockConfig | None = None  # its layer, where heads or RoPE are not the target's
    draft_ids: tuple[int, ...] = ()  # target ids of its head; () is the whole vocabulary
    tapped_layers: tuple[int, ...] = ()  # streams by the layer they enter; () is 2, L // 2, L - 3

    def __post_init__(self) -> None:
        _at_least(1, self, "num_key_value_heads", "intermediate_size")


@dataclasses.dataclass(frozen=True)
class GlideConfig:
    """A GLIDE drafter: one layer with cross-attention to the target's last keys and values."""

    self_attention_num_key_value_heads: int
    self_attention_intermediate_size: int
    block_size: int = 5  # training: a token sees the target's rows of earlier blocks

    def __post_init__(self) -> None:
        names = [field.name for field in dataclasses.fields(self)]
        _at_least(1, self, *names)


@dataclasses.dataclass(frozen=True)
class IndependentConfig:
    """A small model of its own with the target's vocabulary."""

    model: TargetConfig


@dataclasses.dataclass(frozen=True)
class BorrowedConfig:
    """A small model of the target's width that uses the target's embeddings and head."""

    model: TargetConfig


@dataclasses.dataclass(frozen=True)
class LookupConfig:
    """Prompt lookup: drafts what followed the same tokens the last time."""

    longest_match: int = 3  # tokens that are looked for, then fewer
    shortest_match: int = 1

    def __post_init__(self) -> None:
        _at_least(1, self, "shortest_match")
        if self.longest_match < self.shortest_match:
            raise InputError(
                f"longest_match is {self.longest_match}, below shortest_match "
                f"{self.shortest_match}: raise it"
            )


DrafterConfig = (
    MoaConfig
    | EagleConfig
    | Eagle3Config
    | GlideConfig
    | IndependentConfig
    | BorrowedConfig
    | LookupConfig
)


@dataclasses.dataclass(frozen=True)
class DraftShape:
    """How much one round drafts; `depth` counts levels with the root, so 1 is plain decoding.

    chain          breadth 1: depth - 1 tokens, one after the other
    dynamic tree   every level keeps its `breadth` likeliest nodes and gives each as many
                   children; the `total_tokens` likeliest of all are verified
    static tree    `paths` says which: (0, 1) is the second child of the root's first
    """

    depth: int
    breadth: int = 1
    total_tokens: int | None = None  # most drafted nodes, the root apart; None: all candidates
    paths: tuple[tuple[int, ...], ...] = ()
    confidence: float = 0.0  # nodes less probable than this, by the drafter, are left out
    sampled: bool = False  # candidates are drawn from the drafter, else its likeliest are taken

    def __post_init__(self) -> None:
        _at_least(1, self, "depth", "breadth")
        if self.total_tokens is not None:
            _at_least(1, self, "total_tokens")
        if self.depth > MAX_DEPTH:
            raise InputError(f"depth is {self.depth}: choose at most {MAX_DEPTH}")
        if not 0 <= self.confidence < 1:
            raise InputError(f"confidence is {self.confidence}: choose from 0 to below 1")
        if self.sampled and self.is_dynamic:
            raise InputError(
                "sampled candidates of a dynamic tree would be chosen by their luck, which "
                "changes the law: use a chain or a static tree, or the likeliest candidates"
            )
        if self.paths:
            self._check_paths()

    @classmethod
    def static(cls, paths: Any, **rest: Any) -> DraftShape:
        """The shape of a static tree from its paths in any order; InputError if none is one."""
        try:
            ordered = sorted({tuple(map(int, path)) for path in paths}, key=lambda p: (len(p), p))
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

    @property
    def is_dynamic(self) -> bool:
        return self.breadth > 1 and not self.paths

    @property
    def is_chain(self) -> bool:
        """Whether every node has one child at most, so that an accepted path moves no rows."""
        return self.breadth == 1 and (not self.paths or max(map(max, self.paths)) == 0)

    @property
    def num_drafted(self) -> int:
        """Nodes of one round, the root apart."""
        if self.paths:
            return len(self.paths)
        if self.depth == 1:
            return 0
        candidates = self.breadth + (self.depth - 2) * self.breadth**2
        return min(self.total_tokens or candidates, candidates)

    @property
    def num_nodes(self) -> int:
        """Tokens of one verification."""
        return 1 + self.num_drafted

    @property
    def levels(self) -> int:
        """Most tokens that one round commits."""
        return min(self.depth, self.num_nodes)

    @property
    def num_rows(self) -> int:
        """Rows that a round needs in any cache behind the verified ones."""
        return max(self.num_nodes, 1 + max(self.depth - 2, 0) * self.breadth)

    @property
    def most_children(self) -> int:
        """Most candidates that one node gets."""
        return 1 + max(map(max, self.paths)) if self.paths else self.breadth

    @property
    def tree_paths(self) -> tuple[tuple[int, ...], ...]:
        """The paths of a static tree; a chain is one whose nodes are first children."""
        return self.paths or tuple((0,) * k for k in range(1, self.levels))

    @property
    def widths(self) -> tuple[int, ...]:
        """Numbers of nodes that get a verification of their own when drafts stop early."""
        if not self.confidence:
            return (self.num_nodes,)
        if self.is_chain:
            return tuple(range(1, self.num_nodes + 1))
        doubled = [1 << k for k in range(1, self.num_nodes.bit_length())]
        return (*(width for width in doubled if width < self.num_nodes), self.num_nodes)


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How one answer's tokens are chosen from the target's logits; temperature 0 is greedy."""

    temperature: float = 0.0
    top_k: int = 0  # keep the k likeliest tokens; 0 keeps all
    top_p: float = 1.0  # keep the fewest likeliest tokens that hold this much probability
    min_p: float = 0.0  # keep tokens at least this likely relative to the likeliest
    repetition_penalty: float = 1.0  # above 1 makes tokens seen before less likely
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit)
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low, high in (("temperature", 0.0, 1e6), ("min_p", 0.0, 1.0)):
            if not low <= getattr(self, name) <= high:
                raise InputError(f"{name} is {getattr(self, name)}: choose from {low} to {high}")
        if not 0 < self.top_p <= 1:
            raise InputError(f"top_p is {self.top_p}: choose above 0 and at most 1")
        if not 0 < self.repetition_penalty < 1e6:
            raise InputError(
                f"repetition_penalty is {self.repetition_penalty}: choose above 0, below a million"
            )
        _at_least(0, self, "top_k", "seed")
        if self.seed >= 1 << 32:
            raise InputError(f"seed is {self.seed}: choose one below 2**32")
        for _, bias in self.logit_bias:
            if not bias < float("inf"):
                raise InputError(f"logit_bias holds {bias}: give numbers below inf, -inf to ban")


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Where training text comes from and which of its tokens count as answers.

    A path is a file or folder, `data:chat/train.jsonl.gz` (below `$MOA_DATA`), `hub:ID/SPLIT`
    (through `datasets`) or `tfds:NAME/SPLIT` (through `tensorflow_datasets`).
    """

    train: tuple[str, ...]
    validation: tuple[str, ...]
    max_length: int  # tokens kept of one conversation
    row_length: int  # tokens in one row of a batch
    rows_per_batch: int  # of all devices and processes together
    weights: tuple[float, ...] = ()  # share of rows from each train path; () deals all rows alike
    cache: str | None = None  # folder of tokenised rows, memory-mapped; None keeps them in memory
    workers: int = 0  # processes that tokenise; 0 is one a core
    bad_records: Literal["skip", "refuse"] = "skip"  # what follows a record that cannot be used
    sources: tuple[str, ...] = ()  # keep records whose `source` ends with one of these; () is all
    pack: bool = True  # several conversations in a row, kept apart by segment ids
    answers: Literal["turns", "reference"] = "turns"  # `reference`: as the paper's code, which
    # also trains on every user turn after the first answer
    seed: int = 0

    def __post_init__(self) -> None:
        _at_least(1, self, "max_length", "row_length", "rows_per_batch")
        _at_least(0, self, "seed", "workers")
        if self.weights and len(self.weights) != len(self.train):
            raise InputError(
                f"{len(self.weights)} weights for {len(self.train)} train paths: give one each"
            )
        if not all(0 < weight < float("inf") for weight in self.weights):
            raise InputError(f"weights are {self.weights}: choose numbers above 0")


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """AdamW with warm-up to a peak, linear decay to a constant rate, and clipping.

    The rate climbs from 0 to `peak * learning_rate` in `warmup_steps`, falls linearly to
    `learning_rate` within `decay_steps` more, then stays. The paper uses a peak of 20.
    """

    learning_rate: float
    warmup_steps: int
    decay_steps: int
    peak: float
    total_steps: int
    b1: float = 0.9
    b2: float = 0.95
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    accumulate: int = 1  # micro-batches averaged into one update

    def __post_init__(self) -> None:
        _at_least(0, self, "warmup_steps", "decay_steps")
        _at_least(1, self, "total_steps", "accumulate")


@dataclasses.dataclass(frozen=True)
class MaskConfig:
    """How training hides the future from the drafter, so that it sees what decoding sees."""

    variable_future_length: bool = True
    shortest_future: int = 6  # variable length: every 6th to 14th token is known, one period a row
    longest_future: int = 14
    staircase: bool = True
    on_policy_reuse: bool = False  # reused layers see what they see in decoding (masks.on_policy)
    bounded: bool = True  # False is standard training: all of a token's past counts as known

    def __post_init__(self) -> None:
        _at_least(1, self, "shortest_future")
        if self.longest_future < self.shortest_future:
            raise InputError(
                f"longest_future is {self.longest_future}, below shortest_future "
                f"{self.shortest_future}: raise it"
            )


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """What the drafter is trained for; the defaults are the paper's.

    token      cross_entropy     - sum p log q, p the target's law and q the drafter's
               total_variation   1 - sum min(p, q), the chance that sampling rejects a draft
               log_acceptance    - log sum min(p, q), its gradient stays large where they differ
    feature    distance between what goes to the head and the target's own (TLI: and between
               what enters the reused layers and the target's own, half each)
    """

    token: Literal["cross_entropy", "total_variation", "log_acceptance"] = "cross_entropy"
    token_weight: float = 0.1
    feature_weight: float = 1.0
    feature_fade: float | None = None  # share of the run after which the feature loss is gone

    def __post_init__(self) -> None:
        if self.feature_fade is not None and not 0 < self.feature_fade <= 1:
            raise InputError(f"feature_fade is {self.feature_fade}: choose above 0 and at most 1")


@dataclasses.dataclass(frozen=True)
class FeedbackConfig:
    """How drafters that are fed their own features (the EAGLE family) learn to bear that.

    `steps` passes, each fed with the features of the one before it: 1 is EAGLE-1 and EAGLE-2, more
    is the training-time test of EAGLE-3 (HASS, for the former). Noise is uniform, this wide, on
    the features and embeddings of the first pass.
    """

    steps: int = 1
    noise: float = 0.0
    noisy_target: bool = False  # the features with noise are also what is learnt (authors' code)
    decay: float = 1.0  # each pass counts so much less than the one before it

    def __post_init__(self) -> None:
        _at_least(1, self, "steps")
        for name in ("noise", "decay"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise InputError(f"{name} is {getattr(self, name)}: choose a number from 0 on")


@dataclasses.dataclass(frozen=True)
class ChunkConfig:
    """Tokens of each row that are worked on at a time, so that memory stays small; 0 is all.

    Chunks are computed again in the backward pass. Results differ by rounding alone.
    """

    head: int = 128  # logits and losses: float32 of (rows, chunk, vocabulary)
    memory: int = 256  # layer self-attention: (rows, chunk, layers, memory width)

    def __post_init__(self) -> None:
        _at_least(0, self, "head", "memory")


@dataclasses.dataclass(frozen=True)
class Objective:
    """All that a drafter's loss depends on beside weights and data."""

    masks: MaskConfig = MaskConfig()
    loss: LossConfig = LossConfig()
    chunks: ChunkConfig = ChunkConfig()
    feedback: FeedbackConfig = FeedbackConfig()


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """How devices share the work; one of the three may be -1 and takes what the others leave.

    data      rows of a batch, weights copied
    fsdp      rows of a batch, weights cut and gathered layer by layer
    tensor    heads, feed-forwards and vocabulary of every layer
    """

    data: int = 1
    fsdp: int = -1
    tensor: int = 1

    def __post_init__(self) -> None:
        sizes = (self.data, self.fsdp, self.tensor)
        if any(size < 1 and size != -1 for size in sizes) or sizes.count(-1) > 1:
            raise InputError(f"mesh {sizes}: give sizes of at least 1, at most one of them -1")


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Bookkeeping of a training run."""

    directory: str
    log_every: int = 10
    eval_every: int = 100
    eval_batches: int = 4
    save_every: int = 100
    keep_checkpoints: int = 2  # the newest; the best by simulated tau is kept beside them
    not_finite: Literal["stop", "skip"] = "stop"  # what follows a loss or gradient that is not
    decode_prompts: int = 0  # validation prompts decoded at each checkpoint, for the real tau
    tensorboard: bool = False  # beside metrics.jsonl; needs the extra `tensorboard`
    seed: int = 0
    dtype: Literal["float32", "bfloat16"] = "float32"  # of activations; weights stay float32

    def __post_init__(self) -> None:
        _at_least(1, self, "log_every", "eval_every", "eval_batches", "save_every")
        _at_least(1, self, "keep_checkpoints")
        _at_least(0, self, "decode_prompts")


@dataclasses.dataclass(frozen=True)
class PretrainConfig:
    """`train.pretrain`: a small target from text."""

    target: TargetConfig
    data: DataConfig
    optim: OptimConfig
    run: RunConfig
    tokenizer: str  # folder with a tokenizer; trained there from the data if it does not exist
    output: str  # Hugging Face folder of the finished target


@dataclasses.dataclass(frozen=True)
class DistillConfig:
    """`train.distill`: a drafter for a frozen target."""

    target: str  # Hugging Face folder or hub id
    drafter: DrafterConfig
    data: DataConfig
    optim: OptimConfig
    run: RunConfig
    output: str  # folder of the finished drafter
    masks: MaskConfig = MaskConfig()
    loss: LossConfig = LossConfig()
    chunks: ChunkConfig = ChunkConfig()
    feedback: FeedbackConfig = FeedbackConfig()
    mesh: MeshConfig = MeshConfig()
    horizon: int = 6  # future positions whose agreement is reported
    # Draft vocabulary (a file of train.vocabulary) for drafters with a head of their own.
    vocabulary: str | None = None

    def __post_init__(self) -> None:
        _at_least(1, self, "horizon")

    @property
    def objective(self) -> Objective:
        """What the drafter's loss is made from."""
        return Objective(self.masks, self.loss, self.chunks, self.feedback)


@dataclasses.dataclass(frozen=True)
class GridConfig:
    """`train.grid`: drafters trained alike, compared on the same prompts.

    Cells share target, data, number of updates and, about, of trainable parameters. Every cell is
    trained with each learning rate and seed. Of the learning rates the one with the highest
    simulated tau counts. Without any, each cell keeps the rate of its own config, such as the one
    that a shorter grid found best for it.
    """

    cells: tuple[tuple[str, DistillConfig], ...]
    learning_rates: tuple[float, ...]  # tried with every cell; () is each cell's own
    directory: str  # of runs, drafters and the report
    reference: str  # the cell that the others are divided by
    seeds: tuple[int, ...] = (0,)
    tolerance: float = 0.05  # of trainable parameters, from those of `reference`
    unmatched: tuple[str, ...] = ()  # cells that may differ, in all but the target
    shapes: tuple[DraftShape, ...] = (DraftShape(7), DraftShape(7, 8, 62))
    prompts: int = 64  # of the validation data, decoded with every finished drafter
    max_new_tokens: int = 128

    def __post_init__(self) -> None:
        names = [name for name, _ in self.cells]
        if len(set(names)) < len(names):
            raise InputError(f"two cells of one name among {', '.join(names)}: rename one")
        for name in (self.reference, *self.unmatched):
            if name not in names:
                raise InputError(f"no cell {name!r} among {', '.join(names)}: name one of them")
        if not self.seeds:
            raise InputError("a grid needs at least one seed")
