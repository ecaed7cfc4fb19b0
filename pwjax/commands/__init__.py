"""The commands of `pwjax`, a module each: `add_arguments(parser)` and `run(args) -> dict`, the JSON of the last line.

Nothing here imports JAX at module level: the process is configured from the command's options first.
"""
