"""Checkpoints in and out: Hugging Face folders, and the Orbax store of a prepared model."""
