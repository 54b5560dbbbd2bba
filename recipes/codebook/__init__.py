"""The codebook task: a verifiable task small enough to learn on two CPU cores in seconds."""
