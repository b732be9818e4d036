"""Settings of training runs: each config file defines one `config`, see moa_jax.config."""
