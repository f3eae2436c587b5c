"""The command line: one file a command, and what several of them share. No engine code; the HTTP server will live here too."""
