"""`composer-plugins doctor --verl`. Beside `verl_plugin`, which registers in verl when it is imported."""
