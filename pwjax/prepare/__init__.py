"""`pwjax prepare`: from a Hugging Face MoE folder to the store that is served."""

from pwjax.prepare.options import PrepareOptions
from pwjax.prepare.pipeline import prepare

__all__ = ["PrepareOptions", "prepare"]
