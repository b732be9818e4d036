"""Flags that several programs share, and what they load."""
