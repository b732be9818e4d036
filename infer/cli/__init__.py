"""Modules that all programs share: parser, flags, documents, streams.

program.py        the parser, progress bars, and errors as one line with exit code 2 or 75
flags/            groups of flags, and what their values load
documents.py      the JSON documents and text that programs print
streams.py        standard output and errors that survive a closed pipe
compile_cache.py  the folder of compiled programs
"""
