"""Files to batches: sources, decoding, transforms, order, loader, shards, doctor."""
