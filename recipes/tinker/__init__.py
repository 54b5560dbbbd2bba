"""Tinker's SDK against SkyRL's server on this CPU: the codebook task, trained over HTTP."""
