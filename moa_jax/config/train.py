"""Settings of training runs: data, optimiser, objective, devices, bookkeeping, grids."""

from __future__ import annotations

import dataclasses
from typing import Literal

from moa_jax.config.checks import at_least, finite
from moa_jax.config.draft import MAX_DEPTH, DraftShape
from moa_jax.config.model import DrafterConfig, TargetConfig
from moa_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Sources of training data, and the rule for which tokens count as answers.

    A path is a file or folder, or has one of these forms:

        gs://BUCKET/PATH               a file or folder in a bucket
        data:chat/train.jsonl.gz       relative to `$MOA_DATA`
        hub:ID/SPLIT                   through `datasets`
        hub:ID@REVISION/SPLIT          through `datasets`, at a commit, tag or branch
        tfds:NAME/SPLIT                through `tensorflow_datasets`
        PATH?messages=dialog           any of these; its column `dialog` holds the messages
    """

    train: tuple[str, ...]
    validation: tuple[str, ...]
    max_length: int  # maximum tokens per conversation
    row_length: int  # tokens per row of a batch
    rows_per_batch: int  # over all devices and processes
    weights: tuple[float, ...] = ()  # share of rows from each train path; () mixes all rows evenly
    cache: str | None = None  # folder of tokenised rows, memory-mapped; None keeps them in memory
    workers: int = 0  # processes that tokenise; 0 is one per core
    bad_records: Literal["skip", "refuse"] = "skip"  # handling of unusable records
    sources: tuple[str, ...] = ()  # keep records whose `source` ends with one of these; () is all
    pack: bool = True  # pack several conversations into a row, separated by segment ids
    longest_first: bool = False  # packing takes the longest of thousands first: fuller rows
    answers: Literal["turns", "reference"] = "turns"  # `reference`: as in the paper's code, which
    # also trains on every user turn after the first answer
    seed: int = 0

    def __post_init__(self) -> None:
        at_least(1, self, "max_length", "row_length", "rows_per_batch")
        at_least(0, self, "seed", "workers")
        if self.weights and len(self.weights) != len(self.train):
            raise InputError(
                f"{len(self.weights)} weights for {len(self.train)} train paths; give one each"
            )
        if not all(0 < weight < float("inf") for weight in self.weights):
            raise InputError(f"weights are {self.weights}; choose numbers above 0")


@dataclasses.dataclass(frozen=True)
class OptimConfig:
    """AdamW with warm-up to a peak, linear decay to a constant rate, and gradient clipping.

    The rate rises from 0 to `peak * learning_rate` in `warmup_steps`, falls linearly to
    `learning_rate` within `decay_steps` more, then is constant. The paper uses a peak of 20.
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
        at_least(0, self, "warmup_steps", "decay_steps")
        at_least(1, self, "total_steps", "accumulate")
        finite(self, "learning_rate", "peak", "weight_decay")
        finite(self, "max_grad_norm", above_zero=True)
        for name in ("b1", "b2"):
            if not 0 <= getattr(self, name) < 1:
                raise InputError(f"{name} is {getattr(self, name)}; choose from 0 on, below 1")


@dataclasses.dataclass(frozen=True)
class MaskConfig:
    """Masks that hide the future from the drafter, so that training matches decoding."""

    variable_future_length: bool = True
    shortest_future: int = 6  # variable length: every 6th to 14th token is known, drawn per row
    longest_future: int = 14
    staircase: bool = True
    on_policy_reuse: bool = False  # reused layers see the same rows as in decoding: masks.on_policy
    bounded: bool = True  # False is standard training: all earlier tokens count as known
    # Not in the paper: a second pass over the same memory, in which every token is the first of a
    # round. Without this pass one token in ten is trained as a first token, the most often drafted.
    first_tokens: bool = False

    def __post_init__(self) -> None:
        at_least(1, self, "shortest_future")
        if self.longest_future < self.shortest_future:
            raise InputError(
                f"longest_future is {self.longest_future}, below shortest_future "
                f"{self.shortest_future}; raise it"
            )
        if self.first_tokens and not self.bounded:
            raise InputError(
                "first_tokens with bounded False: without the bound every token is the first of a "
                "round already; leave first_tokens out"
            )


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """Terms of the drafter's loss; the defaults are the paper's.

    token      cross_entropy     - sum p log q; p are the target's probs, q the drafter's
               total_variation   1 - sum min(p, q), the chance that sampling rejects a draft
               log_acceptance    - log sum min(p, q), whose gradient stays large if p and q differ
    feature    distance between the head's input and the target's final-normed state (with TLI,
               half; the other half is the distance at the input of the reused layers)
    """

    token: Literal["cross_entropy", "total_variation", "log_acceptance"] = "cross_entropy"
    token_weight: float = 0.1
    feature_weight: float = 1.0
    feature_fade: float | None = None  # fraction of the run after which the feature weight is 0

    def __post_init__(self) -> None:
        weights = self.token_weight, self.feature_weight
        if not all(0 <= weight < float("inf") for weight in weights) or not any(weights):
            raise InputError(
                f"token_weight is {weights[0]} and feature_weight {weights[1]}; choose numbers "
                "from 0 on, not both 0"
            )
        if self.feature_fade is not None and not 0 < self.feature_fade <= 1:
            raise InputError(f"feature_fade is {self.feature_fade}; choose above 0 and at most 1")


@dataclasses.dataclass(frozen=True)
class FeedbackConfig:
    """Training of drafters that read their own features (the EAGLE family).

    Training makes `steps` passes, each fed with the features of the previous pass. One pass is
    EAGLE-1 and EAGLE-2, more passes are the training-time test of EAGLE-3 (for EAGLE-1 and 2:
    HASS). `noise` is the width of uniform noise on the target's features and on the embeddings.
    """

    steps: int = 1
    noise: float = 0.0
    decay: float = 1.0  # the weight of each pass, relative to the previous pass

    def __post_init__(self) -> None:
        at_least(1, self, "steps")
        finite(self, "noise", "decay")


@dataclasses.dataclass(frozen=True)
class ChunkConfig:
    """Tokens per row that are computed at a time, to limit memory; 0 is all tokens.

    The backward pass recomputes each chunk. Results differ by rounding only.
    """

    head: int = 128  # logits and losses: float32 of (rows, chunk, vocabulary)
    memory: int = 256  # layer self-attention: (rows, chunk, layers, memory width)

    def __post_init__(self) -> None:
        at_least(0, self, "head", "memory")


@dataclasses.dataclass(frozen=True)
class Objective:
    """All settings of a drafter's loss; weights and data are its other inputs."""

    masks: MaskConfig = MaskConfig()
    loss: LossConfig = LossConfig()
    chunks: ChunkConfig = ChunkConfig()
    feedback: FeedbackConfig = FeedbackConfig()


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Sizes of the training mesh; one size may be -1, for all remaining devices.

    data      rows of a batch, weights replicated
    fsdp      rows of a batch, weights split and gathered layer by layer
    tensor    heads, feed-forwards and vocabulary of every layer

    By default all devices are `fsdp`, for any device memory. Scattering gradients and gathering
    weights sends the same number of bytes as summing gradients, and each device holds a part of
    the optimiser's state. Only the placement of the frozen target depends on the memory: `copied`
    needs no gathering, and `auto` is `copied` if the target takes at most a quarter of a device's
    memory, else `cut`.
    """

    data: int = 1
    fsdp: int = -1
    tensor: int = 1
    target: Literal["auto", "copied", "cut"] = "auto"

    def __post_init__(self) -> None:
        sizes = (self.data, self.fsdp, self.tensor)
        if any(size < 1 and size != -1 for size in sizes) or sizes.count(-1) > 1:
            raise InputError(f"mesh {sizes}; give sizes of at least 1, at most one of them -1")


@dataclasses.dataclass(frozen=True)
class RunConfig:
    """Bookkeeping of a training run."""

    directory: str
    log_every: int = 10
    eval_every: int = 100
    eval_batches: int = 4
    save_every: int = 100
    # Another save is due this long after the last one; checked every `log_every` updates.
    save_every_minutes: float | None = None
    keep_checkpoints: int = 2  # newest checkpoints; the best by tau is kept too
    not_finite: Literal["stop", "skip"] = "stop"  # handling of a non-finite loss or gradient
    # Validation prompts decoded at each checkpoint; None is 8 where that takes at most 2 % of the
    # time, else 0. The best checkpoint is chosen by `decoded_tau` if prompts are decoded.
    decode_prompts: int | None = None
    tensorboard: bool = False  # in addition to metrics.jsonl; needs the extra `tensorboard`
    # In addition to metrics.jsonl; needs the extra of this name.
    tracker: Literal["none", "wandb", "trackio"] = "none"
    seed: int = 0
    dtype: Literal["float32", "bfloat16"] = "float32"  # of activations; weights stay float32
    # On GPUs and TPUs: `blocks` keeps blocks of scores on chip, `einsum` stores all scores.
    attention: Literal["blocks", "einsum"] = "blocks"

    def __post_init__(self) -> None:
        at_least(1, self, "log_every", "eval_every", "eval_batches", "save_every")
        at_least(1, self, "keep_checkpoints")
        if self.save_every_minutes is not None:
            finite(self, "save_every_minutes", above_zero=True)
        if self.decode_prompts is not None:
            at_least(0, self, "decode_prompts")
        at_least(0, self, "seed")
        if self.seed >= 1 << 32:
            raise InputError(f"seed is {self.seed}; choose one below 2**32")


@dataclasses.dataclass(frozen=True)
class PretrainConfig:
    """`train.pretrain`: trains a small target from scratch."""

    target: TargetConfig
    data: DataConfig
    optim: OptimConfig
    run: RunConfig
    tokenizer: str  # folder with a tokenizer; if missing, one is trained on the data
    output: str | None = None  # folder of the finished target; None is final/ of the run


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillConfig(Objective):
    """`train.distill`: trains a drafter for a frozen target by the inherited `Objective`."""

    target: str  # Hugging Face folder or hub id
    drafter: DrafterConfig
    data: DataConfig
    optim: OptimConfig
    run: RunConfig
    output: str | None = None  # folder of the finished drafter; None is final/ of the run
    mesh: MeshConfig = MeshConfig()
    horizon: int = 6  # future positions whose agreement is reported
    # A file of train.vocabulary with the draft vocabulary, for drafters with a separate head.
    vocabulary: str | None = None
    # For drafters that use the target's head: the number of most frequent training answer tokens
    # that the loss covers and the drafter proposes; None is the target's whole vocabulary.
    draft_vocabulary: int | None = None
    init_from: str | None = None  # a drafter's folder or a run with the initial weights

    def __post_init__(self) -> None:
        at_least(1, self, "horizon")
        if self.horizon >= MAX_DEPTH:  # the drafter's folder states a chain of depth horizon + 1
            raise InputError(f"horizon is {self.horizon}; choose at most {MAX_DEPTH - 1}")


def output_of(config: PretrainConfig | DistillConfig) -> str:
    """The folder or URL that a finished run writes its model to."""
    return config.output or f"{config.run.directory}/final"


@dataclasses.dataclass(frozen=True)
class GridConfig:
    """`train.grid`: drafters trained under equal conditions and compared on the same prompts.

    Every cell is trained with each learning rate and seed, and is represented by the rate with the
    highest `simulated_tau`. Without learning rates each cell keeps the rate of its own config, for
    example the best rate of a shorter grid. All cells have one target. Without shapes nothing is
    decoded.
    """

    cells: tuple[tuple[str, DistillConfig], ...]
    learning_rates: tuple[float, ...]  # tried with every cell; () is each cell's own
    directory: str  # of runs, drafters and the report
    reference: str  # the cell that the results of other cells are divided by
    seeds: tuple[int, ...] = (0,)
    shapes: tuple[DraftShape, ...] = (DraftShape(7), DraftShape(7, 8, 62))
    prompts: int = 64  # validation prompts, not trained on, that all finished drafters answer
    max_new_tokens: int = 128
    sets: tuple[str, ...] = ()  # question sets of infer.evaluate, answered besides the prompts
    questions: int = 30  # of each set, first turns
    temperatures: tuple[float, ...] = (0.0,)
    past_end: bool = True  # whether prompts are also answered up to the limit, without stops
    over: tuple[str, ...] = ()  # further cells that the results are divided by
    untrained: tuple[str, ...] = ()  # drafters without weights, such as "lookup", in chains

    def __post_init__(self) -> None:
        names = [name for name, _ in self.cells]
        if len(set(names)) < len(names):
            raise InputError(f"two cells have one name among {', '.join(names)}; rename one")
        for name in (self.reference, *self.over):
            if name not in names:
                raise InputError(f"no cell {name!r} among {', '.join(names)}; name one of them")
        if len({config.target for _, config in self.cells}) > 1:
            raise InputError("the cells of a grid have several targets; give them one")
        if not self.seeds:
            raise InputError("a grid has no seeds; give it one")
        at_least(1, self, "prompts", "questions")
        at_least(2, self, "max_new_tokens")  # the first token precedes all rounds
