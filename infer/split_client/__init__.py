"""The client side of split decoding: drafts, and continues an answer when the link fails.

A round passes through these files from top to bottom, and its reply from bottom to top:

    answering.py   SplitClient: one answer, with and without a link
    drafter.py     SequenceDrafter: drafts, decodes without the target, tracks the cache rows of the
                   ClientDrafter of moa_jax/split/client_drafter.py
    session.py     RemoteSession: one session over any number of links
    link.py        Link: one connection and its deadlines
    protocol.py    in moa_jax/split: messages <-> bytes <-> the server
    replies.py     checks a complete reply before the client uses its content

Shared by these files:

    state.py       options, the sequence of an answer, counters
    pace.py        chooses draft lengths from measured times and acceptance rates
    figures.py     figures of an answer that infer.client and infer.bench report
    flags.py       command-line flags of both infer.client and infer.bench
"""
