"""What a model is and takes, by its config.json and its layout alone; without torch."""
