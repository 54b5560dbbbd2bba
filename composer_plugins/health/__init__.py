"""What the tensors of a batch say about the state of its run, and what a run's log says about it."""
