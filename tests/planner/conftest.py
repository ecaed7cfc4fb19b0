"""Hypothesis without a deadline (shared machines are slow at times) and with the same examples on every run."""

from hypothesis import settings

settings.register_profile("planner", deadline=None, derandomize=True, max_examples=60)
settings.register_profile("planner-search", deadline=None, max_examples=400)  # --hypothesis-profile=planner-search
settings.load_profile("planner")
