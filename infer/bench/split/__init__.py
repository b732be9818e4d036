"""`infer.bench --split`: client and server over emulated networks, compared with a streaming API.

flags.py    the flags                    pairs.py    target, drafters, prompts, answering modes
run.py      one answer at a time         alone.py    quality of tokens drafted without a link
table.py    the results in Markdown
"""
