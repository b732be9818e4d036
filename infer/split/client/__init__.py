"""The client's half of split decoding: one answer over a link that may die."""
