"""The largest memory of the hint and replay losses in the real TRL trainer, with logits and without.

    python -m benchmarks.linear_trl [--shape B T V]

Each loss, forward and backward, runs alone in a process of its own, on one prepared batch of a Qwen3 with one
small layer. The unit is one tensor of logits, [B, T, V] in float32.
"""

import argparse
import warnings
from collections.abc import Callable
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.timing import THREADS, peak_bytes, peak_of
from benchmarks.trainer_step import scripted
from composer_plugins.recipes.codebook.task import make_tokenizer

SHAPE, HIDDEN, GOAL = (4, 512, 32000), 64, 0.3
CASES: dict[str, dict[str, Any]] = {
    "hint, jsd": {"hint_weight": 1.0},
    "hint, sdpo, top 100": {
        "hint_weight": 1.0,
        "hint_divergence": "sdpo",
        "hint_params": {"top_k": 100, "rest": "tail"},
    },
    "hint, taid": {"hint_weight": 1.0, "hint_divergence": "taid", "hint_params": {"t": 0.5}},
    "hint, sampled token": {"hint_weight": 1.0, "hint_divergence": "sampled_token"},
    "replay, dpo": {"replay_weight": 1.0},
    "policy, TRL's own": {},
    "step: policy, hint, replay": {"hint_weight": 1.0, "replay_weight": 1.0},
}


def trainer(case: str, shape: tuple[int, int, int], fused_linear: bool) -> Any:
    """A trainer whose completions, chosen and rejected answers all have T tokens."""
    rows, length, vocab = shape
    torch.manual_seed(0)
    sizes = {"hidden_size": HIDDEN, "intermediate_size": HIDDEN, "num_hidden_layers": 1, "head_dim": HIDDEN}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1}
    ends = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None}
    config = Qwen3Config(vocab_size=vocab, max_position_embeddings=2 * length, **sizes, **heads, **ends)
    tokenizer = make_tokenizer()
    pairs = {
        side: [f"{i}{digit}" * (length // 2 - 1) for i in range(rows)]
        for side, digit in (("chosen", 5), ("rejected", 6))
    }
    row = {"prompt": "a?", "privileged_context": "[12]", **pairs}
    options = CASES[case] | {"fused_linear": fused_linear}
    model = Qwen3ForCausalLM(config)
    return scripted(model, tokenizer, row, (rows, length), options, num_generations=rows)


def loss(case: str, made: Any) -> Callable[[], None]:
    """The loss of the case, forward and backward."""
    made.model.train()
    made.current_gradient_accumulation_steps = 1
    inputs = made._prepare_inputs(next(iter(made.get_train_dataloader())))
    logprobs = torch.zeros(inputs["completion_ids"].shape)
    terms: dict[str, Callable[[], Any]] = {
        "hint": lambda: made._hint.loss(made, made.model, inputs, logprobs.requires_grad_()),
        "replay": lambda: made._replay.loss(made, made.model, inputs),
    }
    term = terms.get(case.split(",")[0], lambda: made._compute_loss(made.model, inputs))
    return lambda: term().backward()


def table(shape: tuple[int, int, int] = SHAPE) -> Table:
    """The peaks in units of one tensor of logits."""
    b, t, v = shape
    unit = b * t * v * 4
    made = Table(
        "loss, forward and backward",
        "fused_linear=False",
        f"fused_linear=True (goal {GOAL})",
        "MiB",
        title=f"Peak memory in the TRL trainer, B {b}, T {t}, V {v}, in tensors of {unit / 2**20:.0f} MiB",
    )
    for case in CASES:
        options = ["--shape", *map(str, shape)]
        logits = peak_bytes("benchmarks.linear_trl", case, *options)
        fused = peak_bytes("benchmarks.linear_trl", case, *options, "--fused-linear")
        made.add_row(case, f"{logits / unit:.2f}", f"{fused / unit:.2f}", f"{fused / 2**20:.0f}")
    return made


if __name__ == "__main__":
    torch.set_num_threads(THREADS)
    warnings.filterwarnings("ignore")
    parser = argparse.ArgumentParser()
    parser.add_argument("--peak-of", choices=list(CASES))
    parser.add_argument("--shape", type=int, nargs=3, default=SHAPE)
    parser.add_argument("--fused-linear", action="store_true")
    given = parser.parse_args()
    if given.peak_of is None:
        Console(width=120, highlight=False).print(table(tuple(given.shape)))
    else:
        loss(given.peak_of, trainer(given.peak_of, (*given.shape[:1], 8, given.shape[2]), True))()  # warms up
        print(peak_of(loss(given.peak_of, trainer(given.peak_of, tuple(given.shape), given.fused_linear))))
