"""Evaluation through the serving engine: perplexity, and the embedded model's own tasks."""
