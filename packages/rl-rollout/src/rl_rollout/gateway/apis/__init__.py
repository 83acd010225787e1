"""The APIs of agents: each converts its requests and writes answers in its format, complete or streamed."""
