"""Faults on purpose, to show that gates can fail, and a table of public ones. Only tests and the documentation import it; engines never do."""
