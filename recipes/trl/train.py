"""Train with verifiable reward, hints and replayed preferences in TRL's GRPOTrainer.

    accelerate launch recipes/trl/train.py --config recipes/trl/three_channels.yaml
    accelerate launch recipes/trl/train.py --config recipes/trl/three_channels.yaml --hint_weight 0

An option on the command line wins over the file. As it stands this trains the codebook task, on a CPU or a
GPU. To train your own: copy both files, and let the three functions below return what is yours.
"""

from typing import Any

import torch
from datasets import Dataset

from composer_plugins.adapters.trl_mixin import ComposerGRPOConfig, ComposerGRPOTrainer, ComposerParser
from composer_plugins.errors import ComposerError
from composer_plugins.recipes.codebook import task
from composer_plugins.recipes.codebook.run import make_start


def load_model(seed: int) -> dict[str, Any]:
    """Yours: {"model": "Qwen/Qwen3-0.6B"}; its tokenizer is loaded with it."""
    torch.set_num_threads(1)  # the codebook task's model is too small for more
    start = make_start(seed)
    return {"model": start.model, "processing_class": start.tokenizer}


def load_dataset(seed: int) -> Dataset:
    """Yours: datasets.load_dataset("json", data_files="rows.jsonl", split="train"), with the columns

    prompt               a string, or messages
    privileged_context   what the hint channel's teacher may see: a solution, feedback, an error message
    chosen, rejected     replayed traces, the better and the worse: one pair, or lists of equal length
    n_teachers_agreeing  optional: the pair's weight

    and whatever else the reward reads. None is legal in a row that has no hint or no pair.
    """
    return Dataset.from_list(task.codebook_rows(seed))


def reward(completions: list[Any], **columns: Any) -> list[float]:
    """Yours: any reward function of TRL's. The columns of the data set come by their names."""
    return task.codebook_reward(completions, **columns)


def main() -> None:
    """Train, save, and say how the reward moved."""
    (args,) = ComposerParser((ComposerGRPOConfig,)).parse_args_and_config()
    trainer = ComposerGRPOTrainer(
        **load_model(args.seed),
        args=args,
        train_dataset=load_dataset(args.seed),
        reward_funcs=reward,
    )
    trainer.train()
    trainer.save_model()
    rewards = [float(log["reward"]) for log in trainer.state.log_history if "reward" in log]
    trainer.accelerator.print(f"reward: {rewards[0]:.2f} at first, {rewards[-1]:.2f} at last")
    trainer.accelerator.print(f"the model is in {args.output_dir}")


if __name__ == "__main__":
    try:
        main()
    except ComposerError as error:
        raise SystemExit(f"error: {error}") from None
