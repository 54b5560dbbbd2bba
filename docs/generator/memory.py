"""The tables of docs/memory.md: memory of a GPU by channel, from the formulas that stand on that page."""

import re
from collections.abc import Callable
from dataclasses import dataclass

from composer_plugins.kernels.linear.tiles import GPU_TILE
from docs.generator.markdown import table
from docs.generator.written import ROOT

PAGE, MEASURED = ROOT / "docs" / "memory.md", ROOT / "docs" / "trl.md"
GIB = 2**30
GPU = 80 * GIB
ROWS, PROMPT, COMPLETION = 4, 512, 2048  # of a micro-batch
RANK = 16  # of LoRA
ADAM = 8  # bytes per trained weight: two moments in float32


@dataclass(frozen=True)
class Model:
    """The numbers of a model's config."""

    name: str
    hidden: int
    layers: int
    intermediate: int
    kv: int  # key-value heads * their size
    vocab: int

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """The shapes of a layer's weights: q, o, k, v, gate, up, down."""
        h, i = self.hidden, self.intermediate
        return [(h, h), (h, h), (h, self.kv), (h, self.kv), (h, i), (h, i), (i, h)]

    @property
    def layer(self) -> int:
        """The weights of a layer."""
        return sum(a * b for a, b in self.matrices)

    @property
    def head(self) -> int:
        """The weights of the output head, and of the embeddings."""
        return self.vocab * self.hidden

    @property
    def parameters(self) -> int:
        """All weights, without norms and biases."""
        return self.layers * self.layer + 2 * self.head

    def activations(self, lora: bool) -> int:
        """The numbers in bfloat16 per token that the backward pass of a layer needs."""
        return (8 if lora else 10) * self.hidden + 2 * self.kv + 4 * self.intermediate

    @property
    def adapter(self) -> int:
        """The weights of LoRA on all matrices of the layers."""
        return self.layers * RANK * sum(a + b for a, b in self.matrices)


MODELS = (
    Model("7B (Qwen2.5-7B)", hidden=3584, layers=28, intermediate=18944, kv=512, vocab=152064),
    Model("70B (Llama-3.1-70B)", hidden=8192, layers=80, intermediate=28672, kv=1024, vocab=128256),
)


@dataclass(frozen=True)
class Engine:
    """Bytes per weight under an engine with bf16, and over how many GPUs the weights are sharded."""

    name: str
    gpus: int
    weight: int  # of a trained weight
    gradient: int  # with the buckets of DDP
    master: int  # the optimizer's own copy of the weight
    stream: int  # of an activation that gradient checkpointing keeps
    swapped: int  # of a trained weight that is kept while the ema teacher is in its place

    @property
    def is_sharded(self) -> bool:
        """Whether the weights are sharded."""
        return self.gpus > 1


def _fsdp2(gpus: int) -> Engine:
    return Engine("FSDP2", gpus, weight=4, gradient=4, master=0, stream=2, swapped=4)


def _zero3(gpus: int) -> Engine:
    return Engine("ZeRO-3", gpus, weight=2, gradient=2, master=4, stream=2, swapped=2)


ENGINES = (
    Engine("1 GPU", 1, weight=4, gradient=4, master=0, stream=4, swapped=0),
    Engine("DDP", 1, weight=4, gradient=8, master=0, stream=4, swapped=0),
    _fsdp2(8),
    _fsdp2(64),
    _zero3(8),
    _zero3(64),
)


@dataclass(frozen=True)
class Run:
    """A model on an engine, all of it trained or LoRA alone."""

    model: Model
    engine: Engine
    lora: bool
    rows: int = ROWS  # of a micro-batch

    @property
    def trained(self) -> float:
        """The trained weights on one GPU."""
        whole = self.model.adapter if self.lora else self.model.parameters
        return whole / self.engine.gpus

    def weights(self) -> float:
        frozen = 2 * self.model.parameters / self.engine.gpus if self.lora else 0
        return frozen + self.engine.weight * self.trained

    def updates(self) -> float:
        return (self.engine.gradient + ADAM + self.engine.master) * self.trained

    def copy(self) -> float:
        return 0 if self.lora else self.engine.weight * self.model.parameters / self.engine.gpus

    def ema(self) -> float:
        return (4 + self.engine.swapped) * self.trained

    def in_bfloat16(self) -> float:
        """What autocast makes of float32 weights, or what is gathered of sharded weights."""
        if not self.engine.is_sharded:
            return 2 * self.trained
        return 2 * (2 * self.model.layer + 2 * self.model.head)

    @property
    def is_checkpointed(self) -> bool:
        """Whether gradient checkpointing is on: with ZeRO-3 and LoRA the channels refuse it."""
        return not (self.lora and self.engine.name == "ZeRO-3")

    def layer_activations(self) -> float:
        """What the backward pass of one layer needs of its forward pass."""
        return 2 * self.rows * (PROMPT + COMPLETION) * self.model.activations(self.lora)

    def activations(self) -> float:
        """What is kept of one forward pass: the input of each layer, or without checkpointing everything."""
        if not self.is_checkpointed:
            return self.model.layers * self.layer_activations()
        stream = 2 if self.lora else self.engine.stream
        return stream * self.model.layers * self.rows * (PROMPT + COMPLETION) * self.model.hidden

    def replay_activations(self) -> float:
        return 2 * self.activations()

    def backward(self) -> float:
        return (self.layer_activations() if self.is_checkpointed else 0) + self.head_gradient()

    def head_gradient(self) -> float:
        return 0 if self.lora else 4 * self.model.head

    def hint(self) -> float:
        return self._from_logits("hint: `jsd`") if self.engine.is_sharded else self._from_tiles(2)

    def replay(self) -> float:
        return self._from_logits("replay: `dpo`") if self.engine.is_sharded else self._from_tiles(1)

    def _from_logits(self, row: str) -> float:
        return measured(row) * 4 * self.rows * COMPLETION * self.model.vocab

    def _from_tiles(self, tiles: int) -> float:
        return tiles * 4 * GPU_TILE + self.head_gradient()

    def policy_alone(self) -> float:
        fixed = self.weights() + self.updates() + self.in_bfloat16()
        return fixed + self.activations() + self.backward()

    def three_channels(self) -> float:
        hint, replay = self.activations() + self.hint(), self.replay_activations() + self.replay()
        return self.policy_alone() + self.copy() + hint + replay


# The rows of a table; the name of each has the letter of its formula.
LINES: dict[str, Callable[[Run], float]] = {
    "weights (a)": Run.weights,
    "gradients and optimizer (b)": Run.updates,
    "weights in bfloat16 (c)": Run.in_bfloat16,
    "policy: activations (d)": Run.activations,
    "policy: backward pass (e)": Run.backward,
    "**policy alone**": Run.policy_alone,
    "teacher `base` and reference (f)": Run.copy,
    "hint: activations (d)": Run.activations,
    "hint: `jsd` (g)": Run.hint,
    "replay: activations (2 d)": Run.replay_activations,
    "replay: `dpo` (h)": Run.replay,
    "**the three channels**": Run.three_channels,
    "teacher `ema`, in addition (i)": Run.ema,
}


def most_rows(model: Model, engine: Engine, lora: bool) -> int:
    """The largest micro-batch with which the three channels fit into GPU bytes; 0 if none does."""
    rows = 0
    while Run(model, engine, lora, rows + 1).three_channels() <= GPU:
        rows += 1
    return rows


def measured(row: str) -> float:
    """The peak in tensors of logits with fused_linear=False, from the table of docs/trl.md."""
    found = re.search(rf"^\| {re.escape(row)} \| ([\d.]+) \|", MEASURED.read_text(), re.MULTILINE)
    assert found is not None, f"{MEASURED} has no row {row!r}"
    return float(found[1])


def sizes() -> str:
    """GiB on one GPU by channel, for each model and engine: everything trained / LoRA."""
    return "\n".join(map(_sizes, MODELS))


def _sizes(model: Model) -> str:
    heads = [f"{one.name}, {one.gpus} GPUs" if one.is_sharded else one.name for one in ENGINES]
    body = []
    for name, amount in LINES.items():
        cells = []
        for engine in ENGINES:
            both = [_number(amount(Run(model, engine, lora)) / GIB) for lora in (False, True)]
            cells.append(" / ".join(both))
        body.append((name, *cells))
    most = [" / ".join(str(most_rows(model, engine, lora)) for lora in (False, True)) for engine in ENGINES]
    body.append(("the largest B whose three channels fit into 80 GiB", *most))
    return table((f"{model.name}: GiB", *heads), body)


def configs() -> str:
    """The numbers of each model."""
    head = (
        "",
        "hidden",
        "layers",
        "intermediate",
        "key-value width",
        "vocabulary",
        "weights (N)",
        "LoRA's (n)",
    )
    body = [
        (
            one.name,
            *(f"{n:,}" for n in (one.hidden, one.layers, one.intermediate, one.kv, one.vocab)),
            f"{one.parameters / 1e9:.2f}e9",
            f"{one.adapter / 1e6:.0f}e6",
        )
        for one in MODELS
    ]
    return table(head, body)


def engines() -> str:
    """The bytes per weight of each engine."""
    head = ("bytes per trained weight", "weight", "gradient", "optimizer", "activation", "kept for ema")
    body = []
    for one in {engine.name: engine for engine in ENGINES}.values():
        numbers = (one.weight, one.gradient, ADAM + one.master, one.stream, one.swapped)
        body.append((one.name, *map(str, numbers)))
    return table(head, body)


def _number(amount: float) -> str:
    return f"{amount:.0f}" if amount >= 10 or amount == 0 else f"{amount:.1f}"
