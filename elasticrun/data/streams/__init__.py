"""Data sets of streams: files, shards, and iterable data sets."""
