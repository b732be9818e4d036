"""Modules shared by the training programs.

Every run:

    settings.py    configs, dotted flags      loop.py          the training loop
    start.py       checks, the first line     output.py        the finished model's folder
    stop.py        signals that end a run     run_logger.py    progress line, logs, summary
    warm_start.py  weights of an earlier run  target_cache.py  the target's activations, on disk
    decoding.py    decoded tau in training    draft_vocabulary.py  the run's most frequent tokens
    wall_time.py   goodput, and slow hosts    tracker.py       W&B or trackio beside the logs
    model_card.py  the training section of a drafter's card

Answers of the target, for train.regenerate:

    conversations.py  prompts, turn by turn   answers.py      sources of answers
    partial.py        answers so far          endpoint.py     requests to a server, and answers
    connection.py     HTTP client

Grids, for train.grid:

    grid_report.py    Markdown
"""
