#!/usr/bin/env bash
# One of the recipes of this folder in verl's main_ppo:
#     MODEL=Qwen/Qwen3-4B TRAIN=train.parquet VAL=val.parquet bash run.sh NAME [verl's overrides, key=value]
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
name=${1:-}
if [[ -z $name || ! -f $here/$name.yaml ]]; then
    echo "usage: MODEL=.. TRAIN=.. VAL=.. bash run.sh NAME [key=value ...], NAME one of:" \
        "$(cd "$here" && ls -- *.yaml | sed 's/\.yaml$//' | paste -sd' ')" >&2
    exit 2
fi
shift

python3 -m verl.trainer.main_ppo --config-path "$here" --config-name "$name" \
    actor_rollout_ref.model.path="${MODEL:?the model: a folder or a name on the hub}" \
    data.train_files="${TRAIN:?a parquet file: README.md has a row of it}" \
    data.val_files="${VAL:?a parquet file, as TRAIN}" \
    "$@"
