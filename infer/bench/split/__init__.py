"""`infer.bench --split`: client and server over emulated networks, beside a streaming API.

flags.py    the flags                       pairs.py    target, drafters, prompts, ways of answering
run.py      one answer after the other      alone.py    text that a drafter writes without a link
table.py    the results in Markdown
"""
