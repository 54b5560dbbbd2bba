"""Losses for composer-plugins."""
