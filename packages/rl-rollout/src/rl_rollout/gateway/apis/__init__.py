"""The APIs of agents: converts each API's requests, and writes answers in its format, complete or streamed."""
