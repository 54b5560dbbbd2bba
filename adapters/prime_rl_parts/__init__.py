"""What stands behind `prime_rl_loss`, `prime_rl_stamps`, `prime_rl_store`, `prime_rl_echo` and the doctor."""
