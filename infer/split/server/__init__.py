"""The server's half of split decoding: sessions, their queue, and common target passes."""
