"""What measures the server: bench/ is infer.bench --serve."""
