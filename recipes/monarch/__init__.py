"""Training scripts, written for torchrun, in processes that Monarch starts."""
