"""Split decoding: the target and its memory on a server, the drafter on the user's device.

    client                                              server
    embedding, SA, CA, head [+ last N layers]           whole target, LSA
    half.py    DraftHalf: drafts, absorbs rows          slots.py   Slots: caches of many sessions
         |                                                   |
         +-- wire.py     the protocol: messages <-> bytes ---+
             rows.py     rows of verified tokens <-> bytes
             pairing.py  compares both sides' models when they connect

In one round `DraftHalf` drafts, `Verify` carries the draft up, `Slots` verifies it, and `Committed`
brings tokens and rows down, which `DraftHalf` absorbs. There are no sockets here: connections and
schedules are in infer/split, the programs are infer.client and infer.server.
"""
