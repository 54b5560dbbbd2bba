"""NeMo-RL: any policy loss of the catalogue for `grpo_train`, any divergence for `distillation_train`.

The user's page is docs/nemo_rl.md.
"""
