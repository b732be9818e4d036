"""Trouble that people report of such software: each kind once, through the command line."""
