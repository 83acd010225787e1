"""What agents speak: each API's requests as asks, and answers in its words, whole or as they come."""
