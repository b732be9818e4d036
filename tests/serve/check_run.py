"""Runs infer.generate with changed answers of plain decoding, to test the report of --check."""

from infer import generate
from infer.cli.program import run
from moa_jax.decode.exactness import compare


def of_other_texts(target, prompt, plain, drafted, sampling):
    """Changes the last token of plain decoding."""
    return compare(target, prompt, [*plain[:-1], plain[-1] ^ 1], drafted, sampling)


if __name__ == "__main__":
    generate.compare = of_other_texts
    run(generate.main)
