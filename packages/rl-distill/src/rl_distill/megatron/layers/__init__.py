"""Parts of a layer: linear layers and norms, the gated activation, compilation, and recomputation."""
