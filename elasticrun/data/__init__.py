"""Loaders: which sample comes when and on which replica, and how it is read."""
