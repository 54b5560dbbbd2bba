"""A small training script for torchrun that uses our loss as PRIME-RL's trainer does.

    torchrun --standalone --nproc-per-node 2 recipes/monarch/prime_rl_like.py --steps 4

PRIME-RL's own trainer needs a GPU. This script has its arithmetic: the loss is called once per sequence of a
packed micro-batch, the sum is divided by the tokens of all ranks, and gradients are summed over the ranks.
"""

import argparse
import copy
import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from composer_plugins.adapters.prime_rl_plugin import loss_fn

VOCABULARY, HIDDEN = 32, 16
LENGTHS = (5, 9, 3)  # of the sequences in a rank's micro-batch
KWARGS = {"policy": "dppo_tv@prime-rl"}  # what would be in [trainer.loss.kwargs]


@dataclass
class LossInputs:
    """What PRIME-RL gives a custom loss: one sequence, [tokens] each."""

    trainer_logprobs: Tensor
    inference_logprobs: Tensor
    ref_logprobs: Tensor | None
    advantages: Tensor
    loss_mask: Tensor
    loss_weights: Tensor | None


class Model(nn.Module):
    """Predicts each token from the one before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY)

    def forward(self, sequences: Sequence[Tensor]) -> list[Tensor]:
        """The log-probabilities [tokens] of each sequence [1 + tokens], computed as one packed sequence."""
        before, after = torch.cat([one[:-1] for one in sequences]), torch.cat([one[1:] for one in sequences])
        logprobs = self.head(self.embedding(before)).log_softmax(-1).gather(-1, after.unsqueeze(-1))
        return list(logprobs.squeeze(-1).split([len(one) - 1 for one in sequences]))


def train(steps: int) -> tuple[list[float], str]:
    """Train on random sequences, other ones on each rank; return the losses and the hash of the weights."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DistributedDataParallel(Model())
    engine = copy.deepcopy(model.module)  # the rollout engine, one update behind
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    draws = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(steps):
        sequences = [torch.randint(VOCABULARY, (length + 1,), generator=draws) for length in LENGTHS]
        advantages = torch.randn(len(LENGTHS), generator=draws)
        masks = [torch.arange(length) > 0 for length in LENGTHS]  # the first token belongs to the prompt
        with torch.no_grad():
            rollout = engine(sequences)
        engine.load_state_dict(model.module.state_dict())
        tokens = torch.stack([mask.sum() for mask in masks]).sum()
        dist.all_reduce(tokens)
        streams = zip(model(sequences), rollout, advantages, masks, strict=True)
        total = torch.stack(
            [
                loss_fn(LossInputs(policy, old, None, advantage.expand_as(policy), mask, None), **KWARGS).loss
                for policy, old, advantage, mask in streams
            ]
        ).sum()
        loss = total / tokens
        optimizer.zero_grad()
        (loss * ranks).backward()  # DistributedDataParallel divides by the ranks
        optimizer.step()
        dist.all_reduce(loss := loss.detach())
        losses.append(loss.item())
    digest = hashlib.sha256()
    for parameter in model.module.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return losses, digest.hexdigest()


def main() -> None:
    """Train with gloo; the first rank prints the losses and the hashes of all ranks' weights."""
    parser = argparse.ArgumentParser(description="Train a tiny model with a PRIME-RL loss.")
    parser.add_argument("--steps", type=int, default=4)
    steps = parser.parse_args().steps
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    losses, weights = train(steps)
    of_all = [""] * dist.get_world_size()
    dist.all_gather_object(of_all, weights)
    if dist.get_rank() == 0:
        print("losses", *(f"{loss:.4f}" for loss in losses))
        print("weights", *(one[:12] for one in of_all))
    dist.destroy_process_group()
    time.sleep(1)  # a process that ends while gloo's threads still release tensors may abort


if __name__ == "__main__":
    main()
