"""Settings of training runs: each file defines one `config`, see moa_jax.config."""
