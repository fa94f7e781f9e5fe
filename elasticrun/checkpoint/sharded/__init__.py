"""States of which each replica has a part."""
