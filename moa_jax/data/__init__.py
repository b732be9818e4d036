"""From text to batches of rows of tokens.

corpora.py, files.py    records, wherever they lie     tokenizer.py   trains one, loads any
chat.py, reference.py   tokens, and which are answers  encode.py      records -> examples
rows.py, shards.py      rows in memory and on disk     workers.py     many processes at once
batches.py, mixture.py  rows dealt out in batches      report.py      what became of records
batch.py                the training batch
"""
