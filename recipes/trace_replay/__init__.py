"""Trace replay: from an agent's logs to preference pairs, by asking several teachers again at each state."""
