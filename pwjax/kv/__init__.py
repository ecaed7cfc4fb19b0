"""KV blocks of sequences: which arena slots hold which tokens."""
