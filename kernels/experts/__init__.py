"""A layer's experts: products whose weight is each pair's own expert's, and the sum of a token's experts."""
