"""Split decoding: the target and its memory on a server, the drafter on the user's device.

    client                                              server
    embedding, SA, CA, head [+ last N layers]           whole target, LSA
    half.py    DraftHalf: drafts, absorbs rows          slots.py   Slots: caches of all sessions
         |                                                   |
         +-- wire.py     the protocol: messages <-> bytes ---+
             rows.py     rows of verified tokens <-> bytes
             pairing.py  compares both sides' models at connection time

One round: `DraftHalf` drafts, `Verify` carries the draft to the server, `Slots` verifies it,
`Committed` returns tokens and rows, and `DraftHalf` absorbs them. This package opens no sockets:
infer/split has connections and scheduling; infer.client and infer.server are the programs.
"""
