"""What runs inside of a checked replica."""
