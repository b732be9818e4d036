"""Split decoding: the target and its memory on a server, the drafter on the user's device.

    client                                              server
    embedding, SA, CA, head [+ last N layers]           whole target, LSA
    client_drafter.py: drafts, absorbs rows             server_target.py: all sessions' caches
         |                                                   |
         +-- protocol.py  messages <-> bytes ----------------+
             rows.py      rows of verified tokens <-> bytes
             pairing.py   compares both sides' models at connection time

One round: `ClientDrafter` drafts, `Verify` carries the draft to the server, `TargetSlots` verifies
it, `Committed` returns tokens and rows, and `ClientDrafter` absorbs them. This package opens no
sockets: infer/split_client and infer/split_server have connections and scheduling.
"""
