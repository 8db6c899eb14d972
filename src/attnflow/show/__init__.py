"""Relevance to look at: in a terminal, in a notebook, and as pictures. Each module loads only what it draws with."""
