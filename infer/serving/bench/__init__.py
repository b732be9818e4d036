"""`infer.bench --serve`: run.py measures the servers that stage.py starts.

flags.py    its flags                    questions.py  what is asked
stage.py    servers of each way          clients.py    who ask: by a Poisson law, or all the time
counts.py   what /metrics has counted    figures.py    rows of results, from answers and counts
tables.py   the results in Markdown      picture.py    the paper's figure 4
"""
