"""The claims about slime, which is run from a checkout."""
