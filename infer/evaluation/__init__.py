"""What `infer.evaluate` is made of.

From questions to reports:

    suites.py         questions, from files, the hub, tfds, the package
    contenders.py     drafters and modes that take part, plain decoding first
    interview.py      a question put to all of them, turn by turn, timed
    answers.py        their answers on disk, in Spec-Bench's format, resumable
    report.py         tables and JSON;  plots.py  pictures;  paper.py  the paper's figures
    conversations.py  questions from chat records, by source

comparison.py is what `infer.generate --compare` shows: plain and drafted decoding in turns.
golden.py has the files of `infer.check`: a reference's logits after each token of some prompts.
"""
