"""How replicas talk to each other, and agree on boundaries."""
