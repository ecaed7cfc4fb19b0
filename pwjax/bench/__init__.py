"""Benchmarks behind `pwjax bench`: random models at real geometry, floors, and timing."""
