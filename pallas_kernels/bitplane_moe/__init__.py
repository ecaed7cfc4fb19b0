"""Routed experts computed from bit-planes in arena slots."""
