"""Split decoding: the target and its memory on a server, the drafter on the user's device.

    client                                              server
    embedding, SA, CA, head [+ last N layers]           whole target, LSA
    half.py    DraftHalf: drafts, absorbs rows          slots.py   Slots: caches of many sessions
         |                                                   |
         +-- wire.py     messages <-> bytes -----------------+
             rows.py     rows of verified tokens <-> bytes
             pairing.py  what both sides compare first

No sockets here: connections, schedules and programs are in `infer`.
"""
