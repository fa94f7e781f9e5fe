"""Which sample goes where: the order, its cut into batches, and how they are read."""
