"""`python -m twinfer.serve`: the command line, where the `twinfer` script is not on the path. Nothing else."""

from twinfer.serve.cli import main

if __name__ == "__main__":
    main()
