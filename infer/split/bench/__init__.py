"""`infer.bench --split`: run.py measures, on the stage that stage.py sets.

flags.py    its flags                    pairs.py    drafters and ways of answering
stage.py    a server behind a network    crowd.py    many clients, who come by a Poisson law
outage.py   a link that is cut for good  tables.py   the results as tables and a picture
"""
