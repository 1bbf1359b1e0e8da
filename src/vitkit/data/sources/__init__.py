"""Places that hold images: folders, arrays, tables, archives, shards, on disk or remote."""
