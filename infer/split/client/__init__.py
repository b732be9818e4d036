"""The client's half of split decoding: it drafts, and keeps an answer going when the link dies.

One round passes through these files from top to bottom, and its reply comes back up:

    answering.py   SplitClient: one answer, with and without a link
    drafter.py     ClientDrafter: drafts, writes alone, counts the rows in the caches of
                   moa_jax/split/half.py
    session.py     RemoteSession: one session over as many links as that takes
    ../link.py     Link: one connection and its deadlines
    wire.py        in moa_jax/split: messages <-> bytes <-> the server
    replies.py     checks a reply before any of it counts

Beside them:

    state.py       what they share: options, the text of an answer, what it cost
    pace.py        how many tokens to draft, from what was measured
    figures.py     what infer.client and infer.bench report about an answer
    flags.py       what the command lines of infer.client and infer.bench share
"""
