"""The operations of the fast engine, one folder each. Imports nothing: transformers may execute this file."""
