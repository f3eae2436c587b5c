"""Output gate: what attention gives, times the sigmoid of the gate that the query projection gave too."""
