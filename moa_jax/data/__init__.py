"""Text into rows of tokens: corpora (records), chat (tokens), batches (rows)."""
