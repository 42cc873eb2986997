"""Training tools that people have, on a module that autopar made: each file needs its own package and is imported by its own name."""
