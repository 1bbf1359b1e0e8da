"""Data sources: folders, arrays, tables, archives and shards, on disk or remote; one module for each kind."""
