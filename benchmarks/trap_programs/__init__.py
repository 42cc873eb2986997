"""Programs as users write them, by theme: see `benchmarks.traps`."""
