"""Data sets that are read in streams: files, shards, and what others iterate over."""
