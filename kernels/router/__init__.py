"""The choice among experts: which ones each token goes through, and the lists by expert that grouped products walk."""
