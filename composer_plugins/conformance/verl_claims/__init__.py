"""The claims about verl."""
