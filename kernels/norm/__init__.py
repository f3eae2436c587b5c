"""RMS norm of a token's hidden state: alone, after the residual's addition, and of chosen rows only."""
