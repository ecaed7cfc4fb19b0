"""Random inputs and float64 NumPy answers of the ops, shared by the tests and `scripts/check_kernels.py`."""
