"""`infer.bench --split`: client and server over emulated networks, compared with a streaming API.

flags.py    the flags                    pairs.py    target, drafter, prompts, client options
run.py      one answer at a time         table.py    the results in Markdown
"""
