"""Parts of a layer: whose matrices and norms, the gated activation, what is compiled, what is computed again."""
