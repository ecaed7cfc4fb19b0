"""The embedded demo model: its data, its training loop and the two synthetic tasks it is scored on.

Nothing here is needed for serving. `pwjax.demo.synthetic` depends on the standard library alone; the other modules
need Flax, Optax and tokenizers and are imported only by `scripts/train_demo.py`.
"""
