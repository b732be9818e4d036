"""Modules shared by the training programs.

Every run:

    settings.py    configs, dotted flags      loop.py          the training loop
    stop.py        signals that end it        watch.py         what a user sees of it
    warm_start.py  weights of an earlier run  target_cache.py  the target's pass, on disk
    decoding.py    real tau while training    frequent.py      a draft vocabulary of its data

Answers of the target, for train.regenerate:

    conversations.py  what is asked next      answers.py      questions in, answers out
    partial.py        answers so far          endpoint.py     answers of a server
    connection.py     HTTP to it              completions.py  its requests and replies

Grids, for train.grid:

    grid_runs.py      runs, matched cells     grid_decoding.py  their real tau
    grid_report.py    JSON and Markdown
"""
