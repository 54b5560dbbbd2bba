"""Train with verifiable reward, hints and replayed preferences in TRL's GRPOTrainer.

    accelerate launch recipes/trl/train.py --config recipes/trl/three_channels.yaml
    accelerate launch recipes/trl/train.py --config recipes/trl/three_channels.yaml --hint_weight 0

An option on the command line overrides the file. Unchanged, this trains the codebook task on a CPU or a GPU.
For your own training, copy both files and change the three functions below.
"""

import time
from typing import Any

from datasets import Dataset

from composer_plugins.adapters.trl_mixin import ComposerGRPOConfig, ComposerGRPOTrainer, ComposerParser
from composer_plugins.errors import ComposerError
from composer_plugins.recipes.codebook import task
from composer_plugins.recipes.codebook.run import make_start


def load_model(seed: int) -> dict[str, Any]:
    """Yours: {"model": "Qwen/Qwen3-0.6B"}; its tokenizer is loaded with it."""
    start = make_start(seed)
    return {"model": start.model, "processing_class": start.tokenizer}


def load_dataset(seed: int) -> Dataset:
    """Yours: datasets.load_dataset("json", data_files="rows.jsonl", split="train"), with these columns:

    prompt               a string, or messages
    privileged_context   the hint, for the teacher only: a solution, feedback, an error message
    chosen, rejected     a better and a worse replayed completion: one pair, or lists of equal length
    n_teachers_agreeing  optional: the weight of the pair

    The columns that your reward function reads come in addition. In a row without a hint, its column is
    None; in a row without a pair, both sides are None.
    """
    return Dataset.from_list(task.codebook_rows(seed))


def reward(completions: list[Any], **columns: Any) -> list[float]:
    """Yours: any reward function for TRL. It gets the columns of the data set by their names."""
    return task.codebook_reward(completions, **columns)


def main() -> None:
    """Train, save the model, and print the first and the last reward."""
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
    trainer.accelerator.end_training()
    time.sleep(1)  # a process that ends while gloo's threads still release tensors may abort


if __name__ == "__main__":
    try:
        main()
    except ComposerError as error:
        raise SystemExit(f"error: {error}") from None
