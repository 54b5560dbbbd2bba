"""The claims about torchtitan's losses of RL."""
