"""What the training programs share: settings, the loop, stops, shards, clusters."""
