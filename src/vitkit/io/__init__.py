"""Files and the network: atomic writes, locks, caches, downloads and hashes, once each. Imports no torch."""
