"""What `infer.server` and `infer.client` are made of."""
