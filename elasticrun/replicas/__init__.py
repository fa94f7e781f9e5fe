"""How replicas talk about the job: a key-value store, and agreement on boundaries."""
