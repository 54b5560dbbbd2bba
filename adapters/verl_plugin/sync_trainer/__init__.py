"""`trainer.v1.trainer_mode: composer_sync`: verl's synchronous trainer with the hint and replay channels."""
