"""States that are split over the replicas."""
