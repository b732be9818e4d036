"""From text to batches of rows of tokens.

sources.py, files.py    records from all sources       records.py     messages, text, ids
chat.py, reference.py   tokens, masks of answers       encode.py      records -> examples
rows.py, shards.py      rows in memory and on disk     tokenizer.py   trains and loads tokenizers
batches.py, mixture.py  rows in batches                workers.py     map over processes
batch.py                the training batch             report.py      counts of records and faults
"""
