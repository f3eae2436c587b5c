"""What happens to queries, keys and values between their projection and attention: norm, rotary embedding, the write into the paged cache."""
