"""The same gradients at any number of replicas."""
