"""The Llama family as pure functions: layers, masks, caches, names and shardings of weights."""
