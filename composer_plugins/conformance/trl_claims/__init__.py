"""The claims about TRL."""
