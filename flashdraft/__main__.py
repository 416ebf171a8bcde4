"""`python -m flashdraft` is the `flashdraft` command."""

from flashdraft.cli import main

if __name__ == "__main__":
    main()
