"""From a step's batch, micro-batches and ranks to metrics."""
