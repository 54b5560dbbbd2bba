"""Claims about SkyRL: its losses, advantages, reductions and corrections are ours, through its table."""
