"""Parts of verl's adapter that do without verl: what `algorithm.composer` may hold, and a run must have."""
