"""Lantern, a framework that does not exist: all that a new framework needs to write, a table and a loss."""
