"""Measurements of autopar, one module each, run as `python -m benchmarks NAME [options]`; see `__main__`."""
