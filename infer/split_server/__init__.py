"""The server side of split decoding: sessions share the target in batched passes.

A request passes through these files from top to bottom, and its reply from bottom to top:

    app.py             SplitServer: WebSocket, /health and /metrics; Connection: messages
    service.py         Service: alternates batches of drafts with chunks of prompts, sends replies
    sessions.py        SplitSession, ReplyBuffer: a client's sequence; SlotQueue: slot assignment
    pass_scheduler.py  PassScheduler: the next chunk of a prompt, and the sequences of a pass
    server_target.py   in moa_jax/split: the target and the caches of all sessions

metrics.py has the metrics of /metrics. infer/http has the parts that all servers share: the
address, HTTP connections, signals, the log.
"""
