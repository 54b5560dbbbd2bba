"""The claims about NeMo-RL, which is run from a checkout."""
