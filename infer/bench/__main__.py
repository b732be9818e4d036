"""`python -m infer.bench`."""

from infer.bench import main
from infer.cli.program import run

if __name__ == "__main__":
    run(main)
