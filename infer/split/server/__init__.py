"""The server's half of split decoding: sessions share the target in common passes.

One request passes through these files from top to bottom, and its reply comes back up:

    app.py         SplitServer: WebSocket, /health and /metrics; Connection: one client's messages
    service.py     Service: batches of drafts and chunks of prompts by turns, and replies
    sessions.py    SplitSession and ReplyBuffer: one client's text; SlotQueue: who has a slot
    slots.py       in moa_jax/split: the target and the caches of all sessions

Beside them metrics.py has what /metrics says, and infer/http what all servers share: the
address, HTTP connections, signals, the log.
"""
