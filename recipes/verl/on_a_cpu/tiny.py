"""Make the files that a run needs: a model, a byte-level tokenizer, sums as prompts, a reward."""

from pathlib import Path

import torch

from composer_plugins.testing.tiny_config import tiny_config

REWARD = '''"""More digits, more reward."""


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **_):
    return sum(c.isdigit() for c in solution_str) / 8
'''
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{m['role']}}\n{{m['content']}}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
END = 8  # 1 modulo this ends a response, as <eos> does, so that lengths differ
SPECIAL = ["<pad>", "<eos>", "<|im_start|>", "<|im_end|>", "<unk>"]


def make(folder: Path) -> None:
    """Write `model/`, with the tokenizer in it, `train.parquet` and `reward.py` into the folder."""
    size = tokenizer(folder / "model")
    model(folder / "model", size)
    data(folder / "train.parquet")
    (folder / "reward.py").write_text(REWARD)


def tokenizer(folder: Path) -> int:
    """Write a tokenizer of bytes with Qwen's marks of a turn, which verl expects; return its size."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = {word: i for i, word in enumerate([*SPECIAL, *alphabet])}
    made = Tokenizer(models.BPE(vocab=words, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        additional_special_tokens=SPECIAL[2:4],
    )
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return len(words)


def model(folder: Path, vocabulary: int) -> None:
    """Write a Qwen2 of two layers, the same in every run."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    options = {"max_position_embeddings": 512, "tie_word_embeddings": False, "bos_token_id": 1}
    made = Qwen2ForCausalLM(Qwen2Config(**tiny_config(vocabulary, 64, **options)))
    made.generation_config.eos_token_id = [*range(1, vocabulary, END)]
    made.save_pretrained(folder)


def data(path: Path) -> None:
    """Write sixteen different prompts; twelve have a hint, and twelve have one or two pairs."""
    from pandas import DataFrame

    rows = [
        {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": f"{i}+{j}=?"}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(i + j)},
            "extra_info": {"index": 4 * i + j, "split": "train"},
            "privileged_context": f"It is {i + j}." if j else None,
            "chosen": [str(i + j), f"={i + j}"][: 1 + j % 2] if (i + j) % 4 else None,
            "rejected": ["no", "?"][: 1 + j % 2] if (i + j) % 4 else None,
        }
        for i in range(4)
        for j in range(4)
    ]
    DataFrame(rows).to_parquet(path)
