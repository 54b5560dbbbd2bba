"""Record the batch of docs/denominators.md: .nox/smollm/bin/python -m docs.recorded.make

SmolLM2-135M-Instruct answers 16 questions four times each, at temperature 1. It then takes UPDATES steps of
AdamW on these answers with DAPO's loss, and the batch is recorded as the next update finds it. The rollout
log-probabilities are those of the same weights in bfloat16, as an inference engine has them.
"""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from composer_plugins import batches
from composer_plugins.recipes.smollm.model import load
from composer_plugins.recipes.smollm.tasks import make_task

QUESTIONS, ANSWERS, TOKENS, UPDATES, RATE = 16, 4, 48, 4, 1e-5
LOW, HIGH = 0.2, 0.28  # DAPO's clip
FOLDER = Path(__file__).parent / "smollm"


def main() -> None:
    """Sample, train and record."""
    torch.manual_seed(0)
    model, tokenizer = load(None, "cpu")
    task = make_task("arithmetic")
    rows = [row for row in task.rows[:QUESTIONS] for _ in range(ANSWERS)]
    asked = [
        tokenizer.apply_chat_template(r["prompt"], add_generation_prompt=True, tokenize=False) for r in rows
    ]
    given = tokenizer(asked, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": TOKENS}
    with torch.no_grad():
        whole = model.generate(**given, **options, pad_token_id=tokenizer.eos_token_id)
    width = given["input_ids"].shape[1]
    ids = whole[:, width:]
    ended = (ids == tokenizer.eos_token_id).long()
    mask = ended.cumsum(-1) - ended == 0  # up to the end of the answer, with it
    attention = torch.cat([given["attention_mask"].bool(), mask], 1)

    def logprobs(of: Any) -> tuple[Tensor, Tensor]:
        places = (attention.cumsum(-1) - 1).clamp(min=0)
        out = of(whole, attention_mask=attention, position_ids=places).logits[:, width - 1 : -1].float()
        every = out.log_softmax(-1)
        return every.gather(-1, ids[..., None])[..., 0], -(every.exp() * every).sum(-1)

    answers = tokenizer.batch_decode(ids, skip_special_tokens=True)
    rewards = torch.tensor([task.score(a, r["answer"]) for a, r in zip(answers, rows, strict=True)])
    groups = rewards.view(-1, ANSWERS)
    advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).view(-1, 1)
    with torch.no_grad():
        old, _ = logprobs(model)
        rollout, _ = logprobs(copy.deepcopy(model).bfloat16())

    def losses(now: Tensor) -> Tensor:  # per token, in plain PyTorch
        ratio = (now - old).exp()
        best = torch.minimum(ratio * advantages, ratio.clamp(1 - LOW, 1 + HIGH) * advantages)
        return torch.where(mask, -best, 0.0)

    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.0)
    for _ in range(UPDATES):
        (losses(logprobs(model)[0]).sum() / mask.sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        now, entropies = logprobs(model)
    tensors = {"ids": ids, "mask": mask, "logprobs": now, "old_logprobs": old, "rollout_logprobs": rollout}
    tensors |= {"entropies": entropies, "advantages": advantages, "rewards": rewards}
    tensors["group_ids"] = torch.arange(len(rows)) // ANSWERS
    texts = {str(i): tokenizer.decode([i]) for i in ids.unique().tolist()}
    for old_file in FOLDER.glob("*.safetensors"):
        old_file.unlink()
    counts, accumulated = {"num_tokens": float(mask.sum()), "num_sequences": float(len(rows))}, 2
    for i, part in enumerate(torch.arange(len(rows)).chunk(accumulated)):
        loss = accumulated * losses(now)[part].sum() / mask.sum()
        about = {
            "factor": float(accumulated),
            "step": UPDATES,
            "framework": "torch",
            "version": torch.__version__,
        }
        kept = {name: x[part] for name, x in tensors.items()}
        extra = {"texts": texts} if i == 0 else {}
        path = batches.save(FOLDER, kept, choice="dapo", loss=loss, counts=counts, extra=extra, **about)
        path.rename(FOLDER / f"step{UPDATES:08d}-micro{i}.safetensors")
    ratio = (now - old).exp()[mask & (advantages != 0)]
    print(f"rewards {rewards.mean():.2f}, ratios {ratio.min():.2f} to {ratio.max():.2f}")


if __name__ == "__main__":
    main()
