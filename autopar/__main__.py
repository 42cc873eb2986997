"""`python -m autopar`, the same as `autopar`."""

from autopar.cli import main

if __name__ == "__main__":
    main()
