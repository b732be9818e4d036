"""Programs compiled ahead of time for hardware that is not there, and read."""
