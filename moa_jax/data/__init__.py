"""From text to batches of rows of tokens.

corpora.py, files.py    records, wherever they lie     records.py     messages, text, ids
chat.py, reference.py   tokens, and which are answers  encode.py      records -> examples
rows.py, shards.py      rows in memory and on disk     tokenizer.py   trains one, loads any
batches.py, mixture.py  rows dealt out in batches      workers.py     many processes at once
batch.py                the training batch             report.py      what became of records
"""
