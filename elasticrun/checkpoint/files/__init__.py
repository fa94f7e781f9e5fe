"""Files: written durably, checked, and captured in memory before."""
