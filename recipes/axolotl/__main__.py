"""`python -m composer_plugins.recipes.axolotl`: write what three_channels.yaml starts from."""

from pathlib import Path

from datasets import Dataset

from composer_plugins.recipes.codebook.run import make_start

FOLDER = Path("axolotl_start")
ROWS = "rows.jsonl"


def main() -> None:
    """Write the model of the codebook task, its tokenizer, and its rows."""
    start = make_start(seed=0)
    start.model.save_pretrained(FOLDER)
    start.tokenizer.save_pretrained(FOLDER)
    Dataset.from_list(start.rows).to_json(FOLDER / ROWS)
    print(f"wrote the model, its tokenizer and {len(start.rows)} rows to {FOLDER}")


if __name__ == "__main__":
    main()
