"""Files to models and back: every published weight format, read as untrusted data."""
