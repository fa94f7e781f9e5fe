"""The rules, and what is said about each of them."""
