"""`infer.bench --split`: run.py measures, on the stage that stage.py sets.

flags.py    what may be asked            pairs.py    drafters, and their ways of answering
stage.py    a server behind a network    crowd.py    many clients that come by a Poisson law
outage.py   a link that is cut for good  tables.py   what was found, for people: tables, a picture
"""
