"""What the training programs share.

Of every run:

    settings.py    configs, dotted flags      loop.py          the training loop
    stop.py        signals that end it        watch.py         what a user sees of it
    warm_start.py  weights of an earlier run  target_cache.py  the target's pass, on disk
    decoding.py    real tau while training    frequent.py      a draft vocabulary of its data

Answers of the target, for train.regenerate:

    conversations.py  what is asked next      answers.py      questions in, answers out
    partial.py        answers so far          endpoint.py     answers of a server
    connection.py     HTTP to it              completions.py  its requests and replies

Grids, for train.grid:

    grid_runs.py      which runs there are    grid_decoding.py  their real tau
    grid_files.py     what they come from     grid_document.py  what was found, as JSON
    earlier.py        rows of other reports   grid_report.py    and as Markdown
"""
