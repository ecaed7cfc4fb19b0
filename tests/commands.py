"""What tests of the command line share."""

EVERY_COMMAND = {"command", "method", "device", "versions", "implementations", "memory_budget_bytes", "seconds"}
"""Fields of the JSON object that every command prints last."""
