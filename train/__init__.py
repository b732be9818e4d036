"""Programs that train targets and drafters: `python -m train.NAME --help`."""
