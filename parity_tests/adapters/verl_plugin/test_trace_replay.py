"""The pairs of recipes/trace_replay in verl's replay channel, in the real `main_ppo`.

From the recorded session of its demo, through three scripted teachers over HTTP, to a parquet file with tool
calls and tools. `recipes/trace_replay/test_command_line.py` does the same in TRL.
"""

import json
from pathlib import Path
from typing import Any

import pytest

for needed in ("detect_secrets", "openai", "pyarrow"):
    pytest.importorskip(needed)

from composer_plugins.recipes.verl.on_a_cpu import runner, tiny  # noqa: E402
from composer_plugins.recipes.verl.on_a_cpu.overrides import quoted  # noqa: E402
from parity_tests.rigs.verl_trained import REFERENCE, SYNC, composers, finished  # noqa: E402

pytestmark = pytest.mark.slow

POSITIONS, LONGEST_PROMPT = 2048, 1536
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] or '' }}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def recorded_pairs(folder: Path) -> Path:
    """The parquet file that the first three steps of the demo make."""
    from composer_plugins.recipes.trace_replay import commands, demo, scripted

    commands.make_states([demo.SESSION], folder, "secrets", demo.TOOLS)
    with scripted.ScriptedTeachers(demo.scripted_answer) as server:
        teachers = demo.teachers(server.base_url)
        commands.ask(folder, teachers, 1.0, samples=1, concurrency=4)
    commands.make_pairs(folder, ignore=demo.IGNORED)
    return folder / "pairs.parquet"


def for_verl(pairs: Path, path: Path) -> list[dict[str, Any]]:
    """The rows with the columns that verl's reward needs, twice, so that there are two steps of four."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pq.read_table(pairs)
    rows = len(table)
    table = table.append_column("data_source", pa.array(["trace_replay"] * rows))
    table = table.append_column("reward_model", pa.array([{"ground_truth": ""}] * rows))
    pq.write_table(pa.concat_tables([table, table]), path)
    return table.to_pylist()


def make_model(folder: Path, rows: list[dict[str, Any]]) -> None:
    """The tiny model with more positions, and a tokenizer of these texts whose template shows tools."""
    from transformers import AutoTokenizer

    tiny.tokenizer(folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer = tokenizer.train_new_from_iterator(map(json.dumps, rows), 1024, show_progress=False)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    tiny.model(folder, len(tokenizer))
    config = folder / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": POSITIONS}))


def test_the_recorded_pairs_train_and_their_margins_rise(tmp_path: Path) -> None:
    rows = for_verl(recorded_pairs(tmp_path / "replay"), tmp_path / "pairs.parquet")
    make_model(tmp_path / "small", rows)
    (tmp_path / "run").mkdir()
    done = finished(
        runner.run(
            tmp_path / "run",
            *SYNC,
            *REFERENCE,
            "+algorithm.composer.replay_weight=0.5",
            "+algorithm.composer.replay_loss=dpo",
            f"data.train_files={quoted(tmp_path / 'pairs.parquet')}",
            f"data.val_files={quoted(tmp_path / 'pairs.parquet')}",
            f"data.max_prompt_length={LONGEST_PROMPT}",
            f"actor_rollout_ref.model.path={quoted(tmp_path / 'small')}",
            f"actor_rollout_ref.rollout.prompt_length={LONGEST_PROMPT}",
            "actor_rollout_ref.rollout.n=2",
        )
    )
    first, second = composers(done)
    assert first["actor/composer/replay/pairs"] == second["actor/composer/replay/pairs"] == 4
    assert first["actor/composer/replay/rewards/margins"] == pytest.approx(0, abs=1e-4)
    assert second["actor/composer/replay/rewards/margins"] > 0.01
