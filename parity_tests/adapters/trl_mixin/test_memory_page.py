"""docs/memory.md: its tables are made from the formulas, and the formulas count what is really there."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from composer_plugins.kernels.linear.tiles import GPU_TILE
from docs.generator import memory
from docs.generator.written import ROOT

CONFIGS = dict(zip((model.name for model in memory.MODELS), (Qwen2Config, LlamaConfig), strict=True))


def config_of(model: memory.Model, head_dim: int) -> Any:
    """A config of transformers of this size."""
    return CONFIGS[model.name](
        hidden_size=model.hidden,
        num_hidden_layers=model.layers,
        intermediate_size=model.intermediate,
        num_attention_heads=model.hidden // head_dim,
        num_key_value_heads=model.kv // head_dim,
        vocab_size=model.vocab,
        tie_word_embeddings=False,
    )


def test_the_text_of_the_page_has_the_numbers_of_its_tables() -> None:
    text = (ROOT / "docs/memory.md").read_text()
    assert f"2^{math.log2(GPU_TILE):.0f} logits" in text
    assert (
        f"B = {memory.ROWS} rows with {memory.PROMPT} tokens of prompt and T = {memory.COMPLETION:,}" in text
    )
    assert f"rank {memory.RANK} " in text and f"L = {memory.PROMPT + memory.COMPLETION:,}" in text
    for row in ("hint: `jsd`", "replay: `dpo`"):
        assert f"{memory.measured(row)} tensors of 4 B T V" in text
    assert len(text.splitlines()) < 90


@pytest.mark.parametrize("model", memory.MODELS, ids=str)
def test_the_weights_are_those_of_transformers_and_peft(model: memory.Model) -> None:
    """On the device meta, which holds no values. Norms and biases are left out of the page: below 0.1 %."""
    with torch.device("meta"):
        built = AutoModelForCausalLM.from_config(config_of(model, 128))
        assert math.isclose(built.num_parameters(), model.parameters, rel_tol=1e-3)
        lora = get_peft_model(built, LoraConfig(r=memory.RANK, target_modules="all-linear"))
    assert lora.get_nb_trainable_parameters()[0] == model.adapter


@pytest.mark.parametrize("model", memory.MODELS, ids=str)
@pytest.mark.parametrize("lora", [False, True])
def test_the_activations_of_a_layer_are_what_autograd_keeps(model: memory.Model, lora: bool) -> None:
    """Of a small model in bfloat16. A tenth is left for sums over a row, whose share falls with the width."""
    small = memory.Model(model.name, hidden=128, layers=1, intermediate=512, kv=64, vocab=64)
    rows, length = 2, 64

    def kept(layers: int) -> int:
        config = config_of(replace(small, layers=layers), 32)
        built = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        if lora:
            adapter = LoraConfig(r=1, target_modules="all-linear")
            built = get_peft_model(built, adapter, autocast_adapter_dtype=False)
            built.enable_input_require_grads()
        weights = {weight.untyped_storage().data_ptr() for weight in built.parameters()}
        found = dict[int, torch.Tensor]()

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.untyped_storage().data_ptr() not in weights:
                found[tensor.untyped_storage().data_ptr()] = tensor
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = built(input_ids=torch.zeros(rows, length, dtype=torch.long))
            assert output.logits.requires_grad  # and so the graph is alive
            return sum(tensor.untyped_storage().nbytes() for tensor in found.values())

    measured = (kept(3) - kept(1)) / 2
    assert math.isclose(measured, 2 * rows * length * small.activations(lora), rel_tol=0.1)
