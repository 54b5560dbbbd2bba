"""The sizes of a tiny language model, for demos, tests and benchmarks without a download."""

from typing import Any


def tiny_config(vocabulary: int, hidden: int, **options: Any) -> dict[str, Any]:
    """Return the options of a Qwen3Config, Qwen2Config or LlamaConfig of two layers and four heads.

    Token 0 pads and token 1 ends a completion. `options` replace these and add others.
    """
    heads = 4
    return {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 2,
        "head_dim": hidden // heads,
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "bos_token_id": None,
        **options,
    }
