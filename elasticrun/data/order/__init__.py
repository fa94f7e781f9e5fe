"""Which sample comes when, and to whom: pure arithmetic."""
