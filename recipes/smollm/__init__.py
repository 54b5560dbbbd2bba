"""A real language model on two cores: SmolLM2-135M-Instruct learns sums, with each channel on and off."""
