"""Files and the network: atomic writes, locks, caches, downloads and hashes. Does not import torch."""
