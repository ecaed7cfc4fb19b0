"""Attention over keys and values in arena slots."""
