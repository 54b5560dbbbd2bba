"""torchtitan's RL trainer with losses of the catalogue. The class is in `loss`, which imports torchtitan."""
