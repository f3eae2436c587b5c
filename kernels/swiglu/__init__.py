"""SwiGLU: the gated activation between the two products of an MLP."""
