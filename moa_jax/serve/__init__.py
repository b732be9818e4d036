"""Split decoding without sockets: messages, the server's slots, the client's half, the pairing."""
