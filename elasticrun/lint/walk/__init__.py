"""The walk: runs a program abstractly and writes down its flow and effects."""
