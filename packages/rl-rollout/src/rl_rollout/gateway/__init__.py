"""A gateway: agents of any kind talk to the policy over HTTP, and exactly what was sampled trains."""
