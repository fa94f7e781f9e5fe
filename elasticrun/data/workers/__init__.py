"""Reading samples ahead, in DataLoader workers."""
