"""Gates: checks that run on whole engines, ours or somebody else's. Nothing but tests, benchmarks and the command line imports them."""
