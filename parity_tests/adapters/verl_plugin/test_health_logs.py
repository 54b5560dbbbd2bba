"""`composer-plugins health` on what verl's own loggers write, wandb's files among them."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import wandb
from verl.utils.logger.aggregate_logger import concat_dict_to_str
from verl.utils.tracking import FileLogger

from parity_tests.rigs.commands import invoke


def test_the_logs_of_verl_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "verl.jsonl"))
    file = FileLogger("project", "run")
    run = wandb.init(mode="offline", dir=tmp_path, settings=wandb.Settings(silent=True, console="off"))
    lines = []
    for step in range(1, 400):  # a .wandb file has blocks of 32 KB
        loss = np.float64(math.nan if step == 3 else 0.1)
        row = {"actor/pg_loss": loss, "actor/lr": 1e-6, **{f"other/{i}": float(i) for i in range(30)}}
        lines.append(concat_dict_to_str(row, step))
        file.log(row, step)
        run.log(row, step=step)
    file.finish()
    run.finish()
    (tmp_path / "console.txt").write_text("\n".join(lines))
    (written,) = tmp_path.rglob("run-*.wandb")
    assert written.stat().st_size > 2 * 32768
    for log in (tmp_path / "verl.jsonl", tmp_path / "console.txt", written):
        (finding,) = json.loads(invoke("health", str(log), "--json").stdout)["findings"]
        assert (finding["key"], finding["step"]) == ("not finite: actor/pg_loss", 3), log
        assert "at 1 of 397 logged steps" in finding["problem"]
