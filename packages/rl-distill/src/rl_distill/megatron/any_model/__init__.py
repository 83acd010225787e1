"""A model of transformers as a rank's chunk: its class, its images, its weights divided over ranks."""
