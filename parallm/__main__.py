"""`parallm`, and `python -m parallm`: every command of the program. Imports no MLX."""

from parallm.cli.program import main

if __name__ == "__main__":
    main()
