"""Reading samples ahead, in other processes."""
