"""Programs that decode, measure, convert and serve: `python -m infer.NAME --help`."""
