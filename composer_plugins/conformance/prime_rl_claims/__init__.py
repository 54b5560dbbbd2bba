"""The claims about PRIME-RL, which is run from a checkout."""
